"""A medium that keeps a read, a write or a sync for ever holds up neither look-ups nor loads, and no verb for long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rewarm
from rewarm.errors import StorageError
from rewarm.store.contract import Outcome
from rewarm.store.raw.following import Follower
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.opening import facts_of
from rewarm.store.raw.reopening import Reopener
from rewarm.store.raw.store import RawStore

KEY = b"the only key of it"
BLOCK = bytes(range(256)) * 256
BOUND_S = 10.0
DEADLINE = "poll=20ms&io_deadline=300ms&close_timeout=500ms"


class Stall:
    """Calls of the system that never answer, for some descriptors, until it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.over = threading.Event(), threading.Event()
        self._monkeypatch = monkeypatch

    def begin(self, *calls: str, descriptors: set[int] | None = None) -> None:
        """Keep these calls, of all descriptors of raw pools where none are named."""
        for name in calls:
            self._monkeypatch.setattr(os, name, self._kept(getattr(os, name), descriptors))

    def _kept(self, call: Callable[..., Any], descriptors: set[int] | None) -> Callable[..., Any]:
        def hang(descriptor: int, *arguments: Any) -> Any:
            if descriptors is None or descriptor in descriptors:
                self.reached.set()
                self.over.wait(3 * BOUND_S)
            return call(descriptor, *arguments)

        return hang


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stall]:
    found = Stall(monkeypatch)
    yield found
    found.over.set()


@pytest.fixture
def url(tmp_path: Path) -> str:
    device = tmp_path / "device"
    with open(device, "wb") as file:
        file.truncate(8 << 20)
    format_device(str(device))
    return f"block://{device}?{DEADLINE}"


def opened(url: str) -> RawStore:
    store = rewarm.open(url, namespace="stalls")
    assert isinstance(store, RawStore)
    return store


def within_bound(action: Callable[[], object]) -> None:
    began_s = time.monotonic()
    action()
    assert time.monotonic() - began_s < BOUND_S


def refused(action: Callable[[], object]) -> None:
    def refuse() -> None:
        with pytest.raises(StorageError, match="answer"):
            action()

    within_bound(refuse)


def test_a_read_of_the_log_that_hangs_holds_up_no_load(url: str, stall: Stall) -> None:
    with opened(url) as store:
        other = b"another key, of a damaged block"
        assert store.save([KEY, other], [BLOCK, BLOCK]).wait(BOUND_S) == [True, True]
        offset = int(store.index.places([other]).offset[0])
        with open(store.path, "r+b") as file:
            file.seek(offset)
            file.write(b"damage")
        stall.begin("preadv", descriptors={store._log.media.descriptor})
        assert stall.reached.wait(BOUND_S)
        found = bytearray(len(BLOCK))
        assert store.lookup([KEY]).leading == 1
        assert store.load([KEY], [found]).wait(BOUND_S) == [True]
        assert found == BLOCK
        damaged = store.load([other], [found])
        assert damaged.wait(BOUND_S) == [False]
        assert damaged.outcomes == [Outcome.CORRUPT], "the log is not waited for beyond the deadline"
        refused(store.refresh)
        refused(store.check)


def test_writes_that_hang_end_saves_and_verbs(url: str, stall: Stall) -> None:
    store = opened(url)
    assert store.save([KEY], [BLOCK]).wait(BOUND_S) == [True]
    assert store.owner is not None
    stall.begin("preadv", "pwritev", "fdatasync", descriptors={store.owner.media.descriptor})
    kept = [store.save([f"a new key, {i}".encode()], [BLOCK]) for i in range(30)]
    for transfer in kept:
        assert transfer.wait(BOUND_S) == [False]
        assert transfer.outcomes[0] in (Outcome.TIMED_OUT, Outcome.LOST_MEDIUM)
    found = bytearray(len(BLOCK))
    assert store.load([KEY], [found]).wait(BOUND_S) == [True]
    refused(store.flush)
    refused(lambda: store.evict(0))
    within_bound(store.close)


def test_a_medium_that_does_not_answer_is_not_opened(url: str, stall: Stall) -> None:
    stall.begin("preadv")
    refused(lambda: rewarm.open(url, namespace="stalls"))


def test_a_look_for_the_device_that_hangs_is_the_only_one(url: str, stall: Stall) -> None:
    path = url.removeprefix("block://").partition("?")[0]
    header = facts_of(path)
    stall.begin("preadv")
    reopener = Reopener(path, bytes(32), direct=False, deadline_s=0.05, poll_s=0.001)
    try:
        until(lambda: reopener.look(header) or (reopener._tried and reopener._tried.overdue()), "the look hangs")
        until(lambda: not reopener.look(header) and reopener._look is None, "the look has given up")
        looks = reopener._looks
        for _ in range(5):
            assert reopener.look(header) is None
        assert reopener._looks == looks
        stall.over.set()
        found: list[Follower] = []
        until(lambda: found.extend(filter(None, [reopener.look(header)])) or found, "it is found once it answers")
        found[0].media.close()
    finally:
        reopener.end()


def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def test_opening_another_pool_does_not_wait_for_one_that_stalls(url: str, stall: Stall, tmp_path: Path) -> None:
    store = opened(url)
    assert store.owner is not None
    stall.begin("preadv", "pwritev", "fdatasync", descriptors={store.owner.media.descriptor})
    closing = threading.Thread(target=store.close)
    closing.start()
    try:
        other = tmp_path / "other"
        with open(other, "wb") as file:
            file.truncate(8 << 20)
        format_device(str(other))
        with opened(f"block://{other}?{DEADLINE}") as healthy:
            assert healthy.save([KEY], [BLOCK]).wait(BOUND_S) == [True]
    finally:
        closing.join(BOUND_S)
    assert not closing.is_alive()
