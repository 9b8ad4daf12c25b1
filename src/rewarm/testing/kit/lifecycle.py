"""Misuse raises: bad keys, closed handles, handles used after fork; descriptors and memory go back to the system."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable

import pytest

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.contract import Outcome, Store
from rewarm.testing.kit.base import BLOCK_BYTES, SMALL_CAPACITY_BYTES, StoreKit, blocks_of, destinations, load, save
from rewarm.testing.payload import make_keys

BAD_KEYS: dict[str, object] = {
    "7 bytes": b"7 bytes",
    "65 bytes": bytes(65),
    "empty": b"",
    "text": "a key of text",
    "bytearray": bytearray(32),
    "number": 12345678,
    "nothing": None,
}

KEY = make_keys(1, "lifecycle")[0]

VERBS: dict[str, Callable[[Store], object]] = {
    "lookup": lambda store: store.lookup([KEY]),
    "in": lambda store: KEY in store,
    "load": lambda store: store.load([KEY], destinations(1)),
    "save": lambda store: store.save([KEY], blocks_of([KEY])),
    "pin": lambda store: store.pin([KEY]),
    "evict": lambda store: store.evict(0),
    "erase": lambda store: store.erase(),
    "check": lambda store: store.check(),
    "refresh": lambda store: store.refresh(),
    "register": lambda store: store.register(bytearray(4096)),
    "flush": lambda store: store.flush(),
}
"""Every verb but `stats`, which may still be read, and `close`, which is harmless."""

CHILD_S_MAX = 30
"""A child that hangs on a lock it inherited is killed by its own alarm after this."""


def _raises_misuse(store: Store) -> dict[str, bool]:
    """Per verb: does it raise `MisuseError`?"""
    answers = {}
    for name, verb in VERBS.items():
        try:
            verb(store)
            answers[name] = False
        except MisuseError:
            answers[name] = True
    return answers


def _in_child(work: Callable[[], bool]) -> int:
    """Run `work` in a forked child; 0 when it returned True."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            signal.alarm(CHILD_S_MAX)
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _descriptors() -> set[str]:
    """Open descriptors with what they point to, without the one that lists them."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue
    return found


class LifecycleTests(StoreKit):
    """Misuse, closing, forking."""

    @pytest.mark.parametrize("kind", BAD_KEYS)
    def test_a_bad_key_is_refused_by_every_verb(self, kind: str) -> None:
        store, good = self.open(), make_keys(1)[0]
        keys: list[bytes] = [good, BAD_KEYS[kind]]  # type: ignore[list-item]
        with pytest.raises(MisuseError):
            store.lookup(keys)
        with pytest.raises(MisuseError):
            keys[1] in store  # noqa: B015
        with pytest.raises(MisuseError):
            store.load(keys, destinations(2))
        with pytest.raises(MisuseError):
            store.save(keys, destinations(2))
        with pytest.raises(MisuseError):
            store.pin(keys)
        assert good not in store, "a refused batch must do nothing"

    def test_a_closed_handle_raises(self) -> None:
        store = self.open()
        save(store, [KEY])
        store.close()
        answers = _raises_misuse(store)
        assert all(answers.values()), answers

    def test_closing_twice_is_harmless(self) -> None:
        store = self.open()
        save(store, [KEY])
        store.close()
        store.close()

    def test_closing_a_handle_that_did_nothing(self) -> None:
        self.open().close()

    def test_a_store_is_a_context_manager(self) -> None:
        with self.open() as store:
            assert save(store, [KEY]) == [Outcome.STORED]
        with pytest.raises(MisuseError):
            store.lookup([KEY])

    def test_a_pin_outlives_its_handle(self) -> None:
        store = self.open()
        save(store, [KEY])
        pin = store.pin([KEY])
        store.close()
        pin.release()
        pin.release()

    @pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
    def test_a_handle_used_after_fork_raises(self) -> None:
        store = self.open()
        save(store, [KEY])
        assert _in_child(lambda: all(_raises_misuse(store).values())) == 0
        assert load(store, [KEY]) == [Outcome.HIT]

    @pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
    def test_a_child_cannot_hurt_its_parent(self) -> None:
        store, keys = self.open(), make_keys(8)
        save(store, keys[:4])

        def close_in_child() -> bool:
            with contextlib.suppress(MisuseError):
                store.close()
            return True

        assert _in_child(close_in_child) == 0
        assert save(store, keys[4:]) == [Outcome.STORED] * 4
        assert load(store, keys) == [Outcome.HIT] * 8

    def test_descriptors_are_close_on_exec(self) -> None:
        before = _descriptors()
        store = self.open()
        save(store, [KEY])
        load(store, [KEY])
        for descriptor in _descriptors() - before:
            number = int(descriptor.split()[0])
            try:
                flags = fcntl.fcntl(number, fcntl.F_GETFD)
            except OSError:
                continue  # Closed since: the listing's own descriptor, or one of a background thread.
            assert flags & fcntl.FD_CLOEXEC, f"descriptor {descriptor} is inherited by exec"

    def test_close_gives_all_descriptors_back(self) -> None:
        def use_once() -> None:
            with self.open() as store:
                save(store, make_keys(4))
                load(store, make_keys(4))

        use_once()  # What a first use leaves behind for the process (imports, name tables) is no leak.
        before = len(_descriptors())
        for _ in range(5):
            use_once()
        assert len(_descriptors()) <= before

    def test_another_capacity_is_refused(self) -> None:
        self.open(capacity_bytes=SMALL_CAPACITY_BYTES)
        with pytest.raises(ConfigError, match="capacity"):
            self.open(capacity_bytes=2 * SMALL_CAPACITY_BYTES)

    def test_memory_can_be_announced(self) -> None:
        store, keys = self.open(), make_keys(2)
        arena = bytearray(2 * BLOCK_BYTES)
        assert 0 <= store.register(arena) <= len(arena)
        save(store, keys)
        parts = [memoryview(arena)[:BLOCK_BYTES], memoryview(arena)[BLOCK_BYTES:]]
        assert store.load(keys, parts).wait() == [True, True]
        assert arena == b"".join(blocks_of(keys))

    def test_blocks_outlive_their_handles(self) -> None:
        if not self.persistent:
            pytest.skip("this store does not claim to be persistent")
        keys = make_keys(64)
        for start in (0, 32):
            with self.open("kept") as store:
                assert load(store, keys[:start]) == [Outcome.HIT] * start
                assert save(store, keys[start : start + 32]) == [Outcome.STORED] * 32
        with self.open("kept") as store:
            assert store.lookup(keys).leading == 64
            assert save(store, keys) == [Outcome.ALREADY] * 64
            assert load(store, keys) == [Outcome.HIT] * 64
            report = store.check()
            assert report.clean, report.findings
            assert report.blocks == 64
