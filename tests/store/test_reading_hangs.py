"""Reads that hang, defects in the loop, files that run out: everybody gets a verdict, and memory back in time."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.faulty_store import WAIT_S, FaultyStore, arena, load, save

from rewarm.errors import StorageError
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import READ
from rewarm.store.loop import _never_freed
from rewarm.store.segments import FileCache
from rewarm.testing import make_keys
from rewarm.testing.faulty import stall

SIZE = 16 << 10
HIT, MISSING, CORRUPT, LOST = Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT, Outcome.LOST_MEDIUM


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path, "&poll=1h") as one:
        yield one


# Requests that hang.


def test_a_read_that_hangs_times_out_while_others_go_on(tmp_path: Path) -> None:
    keys = make_keys(4)
    with FaultyStore(tmp_path, "&io_deadline=1s&poll=1h") as one:
        save(one.store, keys, SIZE)
        one.reads.next(stall(), opcode=READ)
        buffers = arena(1, SIZE)
        hung = one.store.load(keys[:1], buffers)
        assert hung.wait(WAIT_S) == [False], "the deadline of the URL gives the verdict"
        assert hung.outcomes == [Outcome.TIMED_OUT]
        for _ in range(3):
            assert load(one.store, keys[1:], SIZE) == [HIT] * 3
        assert not hung.released()
        assert one.store.stats().unreleased_bytes == SIZE
        assert one.reads.release_stalled() == 1
        assert hung.wait_released(WAIT_S)
        assert one.store.stats().unreleased_bytes == 0
        assert hung.outcomes == [Outcome.TIMED_OUT], "a verdict is final"
        assert load(one.store, keys, SIZE) == [HIT] * 4


def test_a_medium_that_hangs_answers_what_waits_in_line(tmp_path: Path) -> None:
    keys = make_keys(200)
    with FaultyStore(tmp_path, "&poll=1h") as one:
        save(one.store, keys, SIZE)
        one.hurry(0.2)
        one.reads.chance(stall(), 1.0, opcode=READ)
        transfers = [one.store.load([key], arena(1, SIZE)) for key in keys]
        assert one.reads.depth < len(keys), "more than the device takes at once"
        for transfer in transfers:
            assert transfer.wait(WAIT_S) == [False]
            assert transfer.outcomes == [Outcome.TIMED_OUT]


def test_bounced_memory_is_given_back_at_once_and_not_touched_later(tmp_path: Path) -> None:
    keys = make_keys(8)
    with FaultyStore(tmp_path, "&bounce=always&poll=1h") as one:
        save(one.store, keys, SIZE)
        one.reads.chance(stall(), 1.0, opcode=READ)
        buffers = arena(8, SIZE)
        transfer = one.store.load(keys, buffers)
        while one.reads.stalled() < 1:
            transfer.wait_released(0.01)
        transfer.cancel()
        assert transfer.wait_released(WAIT_S), "what hangs only writes to memory of our own"
        buffers[:] = 0x5A
        assert one.reads.release_stalled() > 0
        one.heal()
        assert load(one.store, keys, SIZE) == [HIT] * 8
        assert (buffers == 0x5A).all()


def test_memory_read_in_place_is_kept_until_the_last_read_of_it_is_over(faulty: FaultyStore) -> None:
    keys = make_keys(8)
    save(faulty.store, keys, SIZE)
    faulty.reads.chance(stall(), 1.0, opcode=READ)
    buffers = arena(8, SIZE)
    transfer = faulty.store.load(keys, buffers)
    while not faulty.reads.stalled():
        transfer.wait_released(0.01)
    assert transfer.wait(0.01) == [False] * 8
    assert not transfer.wait_released(0.05)
    faulty.heal()
    assert transfer.wait_released(WAIT_S)
    buffers[:] = 0x5A
    assert load(faulty.store, keys, SIZE) == [HIT] * 8
    assert (buffers == 0x5A).all()


def test_one_hung_read_does_not_keep_all_bounce_memory(tmp_path: Path) -> None:
    large = 8 << 20
    keys = make_keys(8)
    with FaultyStore(tmp_path, "&bounce=always&poll=1h&io_deadline=1h", capacity=1 << 30) as one:
        save(one.store, keys, large)
        one.reads.next(stall(), opcode=READ)
        hung = one.store.load(keys, arena(8, large))
        while sum(outcome is HIT for outcome in hung.outcomes) < 7:
            hung.wait_released(0.01)
        assert load(one.store, keys[-2:], large) == [HIT] * 2, "64 MiB of blocks are back but for one"
        assert not hung.done()


def test_close_is_bounded_and_gives_verdicts(tmp_path: Path) -> None:
    keys = make_keys(3)
    with FaultyStore(tmp_path, "&close_timeout=100ms") as one:
        save(one.store, keys, SIZE)
        one.reads.chance(stall(), 1.0, opcode=READ)
        buffers = arena(3, SIZE)
        hung = one.store.load(keys, buffers)
        while not one.reads.stalled():
            hung.wait_released(0.01)
        one.store.close()
        assert hung.done()
        assert set(hung.outcomes) == {Outcome.CANCELLED}
        assert not hung.released()
        thread = one.store._reads._thread
        assert thread is not None
        one.heal()
        assert hung.wait_released(WAIT_S), "who stays behind gives memory back when the medium answers"
        thread.join(WAIT_S)
        assert not thread.is_alive()


# Defects of our own: nobody may wait for ever.


def test_a_defect_in_the_loop_gives_everybody_a_verdict(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(4)
    save(faulty.store, keys, SIZE)
    faulty.reads.next(stall(), opcode=READ)
    first = faulty.store.load(keys[:1], arena(1, SIZE))
    while not faulty.reads.stalled():
        first.wait_released(0.01)

    def defect(*_: object) -> bool:
        raise TypeError("a defect")

    monkeypatch.setattr(faulty.store._reads, "_judge", defect)
    second = faulty.store.load(keys[1:], arena(3, SIZE))
    for transfer in (first, second):
        assert transfer.wait(WAIT_S) == [False] * len(transfer.outcomes)
        assert set(transfer.outcomes) == {LOST}
    assert not first.released(), "the kernel may still write to it"
    faulty.heal()
    for transfer in (first, second):
        assert transfer.wait_released(WAIT_S)
    assert load(faulty.store, keys, SIZE) == [LOST] * 4
    assert "rewarm-read: TypeError: a defect" in faulty.store.stats().notes
    assert faulty.store.stats().unreleased_bytes == 0
    assert save(faulty.store, make_keys(1, "more"), SIZE) == [Outcome.STORED], "saves go on"


def test_memory_that_a_lost_device_may_still_write_to_is_kept_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(1)
    with FaultyStore(tmp_path, "&poll=1h&close_timeout=100ms") as faulty:
        save(faulty.store, keys, SIZE)
        faulty.reads.next(stall(), opcode=READ)
        hung = faulty.store.load(keys, arena(1, SIZE))
        while not faulty.reads.stalled():
            hung.wait_released(0.01)

        def refused(*_: object) -> object:
            raise StorageError("the ring is gone")

        monkeypatch.setattr(faulty.reads, "reap", refused)
        loop = faulty.store._reads
        assert loop._thread is not None
        loop._thread.join(WAIT_S)
        assert hung.outcomes == [LOST]
        assert not hung.released(), "nobody can say any more whether the read is over"
        assert _never_freed[-1] is loop
        assert "rewarm-read: the ring is gone" in faulty.store.stats().notes


def test_a_thread_that_cannot_start_is_a_miss_and_tried_again(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(1)
    save(faulty.store, keys, SIZE)

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        assert load(faulty.store, keys, SIZE) == [LOST]
    assert load(faulty.store, keys, SIZE) == [HIT]


# Files that are open.


def test_reads_keep_within_the_limit_of_open_files(tmp_path: Path) -> None:
    capacity, size = 32 << 20, 56 << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    keys = make_keys(54)
    with FaultyStore(tmp_path, capacity=capacity) as one:
        for key in keys:
            save(one.store, [key], 9 * size)
    assert len(list((tmp_path / "writers").glob("*/*.seg"))) == len(keys), "a segment for each block"
    in_use = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 34, hard))
        with FaultyStore(tmp_path, "&device=threads", capacity=capacity) as one:
            for _ in range(2):
                assert load(one.store, keys, 9 * size) == [HIT] * len(keys)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_longest_unused_file_is_closed_first(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(5)]
    for path in paths:
        path.write_text(path.name)
    cache = FileCache(os.O_RDONLY, limit=2)
    numbers = {path: cache.acquire(path) for path in paths[:3]}
    assert cache.room() == 0
    assert [os.pread(numbers[path], 9, 0).decode() for path in paths[:3]] == ["0", "1", "2"], "files in use stay open"
    for path in paths[:3]:
        cache.release(path)
    assert cache.room() == 2
    cache.acquire(paths[3])
    cache.forget(paths[3])
    assert os.pread(cache.acquire(paths[3]), 9, 0) == b"3", "a file in use is closed with its last reader"
    cache.release(paths[3])
    before = len(os.listdir("/proc/self/fd"))
    cache.release(paths[3])
    assert len(os.listdir("/proc/self/fd")) == before - 1
    held = cache.acquire(paths[4])
    cache.close()
    assert os.pread(held, 9, 0) == b"4"
    cache.release(paths[4])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
