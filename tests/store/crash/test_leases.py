"""Writers that stop: others take their files over, and what they append afterwards is served by nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.neighbour import Neighbour

from rewarm.store import layout
from rewarm.store.contract import Outcome
from rewarm.store.file import FileStore
from rewarm.store.layout import PAGE, Kind
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

pytestmark = pytest.mark.crash

CAPACITY = 16 << 20
SIZE = 60_000
LEASE_S = 2.0
WAIT_S = 60.0


def url(root: Path) -> str:
    return f"file://{root}?capacity={CAPACITY}&poll=100ms&lease={int(LEASE_S * 1000)}ms"


def open_here(root: Path) -> FileStore:
    store = open_store(url(root), namespace="neighbours")
    assert isinstance(store, FileStore)
    return store


def wait_for(what: Callable[[], bool]) -> None:
    """Look again until it is so."""
    deadline_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not what():
        pause.wait(0.02)
        assert time.monotonic() < deadline_s, "it never happened"


def save(store: FileStore, tag: str, count: int) -> list[Outcome | None]:
    keys = make_keys(count, tag)
    transfer = store.save(keys, [payload(key, SIZE) for key in keys])
    transfer.wait(WAIT_S)
    return transfer.outcomes


def writers(root: Path) -> set[str]:
    return set(os.listdir(root / "writers"))


def test_a_stopped_writer_is_adopted_and_starts_over_when_it_wakes(tmp_path: Path) -> None:
    with Neighbour(url(tmp_path)) as stopped, open_here(tmp_path) as adopter:
        assert stopped.ask(f"save before 10 {SIZE}") == "stored=10"
        (old,) = writers(tmp_path)
        assert set(save(adopter, "mine", 3)) == {Outcome.STORED}
        os.kill(stopped.process.pid, signal.SIGSTOP)
        marker = tmp_path / "writers" / old / "adopted"
        wait_for(marker.exists)
        log = marker.with_name("00000001.log")
        end, adopted = log.stat().st_size, marker.read_bytes()
        os.kill(stopped.process.pid, signal.SIGCONT)
        assert stopped.ask(f"save after 10 {SIZE}").endswith("stored=10")
        assert len(writers(tmp_path)) == 3, "it goes on under a new id"
        assert log.stat().st_size == end, "and appends nothing to files that are no longer its own"
        assert marker.read_bytes() == adopted
        adopter.refresh()
        for tag in ("before", "after"):
            assert adopter.lookup(make_keys(10, tag)).leading == 10
            assert stopped.ask(f"load {tag} 10 {SIZE}") == "hit=10"
        assert adopter.evict(0) > 0
        stopped.ask("refresh")
        assert stopped.ask("held before 10") == "0", "whoever adopted may evict what was never sealed"
        assert stopped.ask(f"save again 10 {SIZE}") == "stored=10"


def test_a_living_writer_is_not_adopted_however_idle(tmp_path: Path) -> None:
    with Neighbour(url(tmp_path)) as idle, open_here(tmp_path) as watcher:
        assert idle.ask(f"save before 10 {SIZE}") == "stored=10"
        assert set(save(watcher, "mine", 3)) == {Outcome.STORED}
        threading.Event().wait(3 * LEASE_S)
        assert not list((tmp_path / "writers").glob("*/adopted"))
        assert idle.ask(f"save after 1 {SIZE}") == "stored=1"
        assert len(writers(tmp_path)) == 2


def test_what_is_appended_to_an_adopted_log_is_served_by_nobody(tmp_path: Path) -> None:
    """The frame of a writer that stopped between its look at the lease and the write, put there by hand."""
    late, early = make_keys(2, "late")
    with Neighbour(url(tmp_path)) as stopped, open_here(tmp_path) as adopter:
        assert stopped.ask(f"save before 10 {SIZE}") == "stored=10"
        (old,) = writers(tmp_path)
        assert set(save(adopter, "mine", 3)) == {Outcome.STORED}
        adopter.refresh()
        os.kill(stopped.process.pid, signal.SIGSTOP)
        wait_for((tmp_path / "writers" / old / "adopted").exists)
        append_entry(tmp_path / "writers" / old, late)
        adopter.refresh()
        with open_here(tmp_path) as fresh:
            for store in (adopter, fresh):
                assert late not in store
                assert store.lookup(make_keys(10, "before")).leading == 10
        os.kill(stopped.process.pid, signal.SIGCONT)
        stopped.ask(f"save after 1 {SIZE}")
        stopped.ask("refresh")
        assert stopped.ask("held late 1") == "0"
        assert early not in adopter


def append_entry(folder: Path, key: bytes) -> None:
    """What the writer would have written: a good block and the frame that names it."""
    import numpy as np

    log = folder / "00000001.log"
    frames = list(layout.scan_frames(memoryview(log.read_bytes())))
    namespace = next(frame.namespace for _, frame in frames if frame.kind == Kind.ENTRIES)
    segment = max(folder.glob("*.seg"))
    at = -(-segment.stat().st_size // PAGE) * PAGE
    with open(segment, "r+b") as file:
        file.seek(at)
        file.write(payload(key, SIZE) + bytes(-SIZE % PAGE))
    one = np.zeros(1, layout.entry_dtype(len(key)))
    one["key"], one["segment"], one["offset"], one["length"] = np.void(key), int(segment.stem), at, SIZE
    one["checksum"] = np.void(layout.digest(payload(key, SIZE)))
    writer, sequence = bytes.fromhex(folder.name), frames[-1][1].sequence + 1
    raw = layout.encode_frame(Kind.ENTRIES, 1, sequence, writer, one.tobytes(), 1, namespace=namespace, key_bytes=32)
    with open(log, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(raw)
