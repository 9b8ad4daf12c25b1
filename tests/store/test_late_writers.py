"""Writers that come too late, and calls that fail while one is made: nothing is lost in silence, and saves go on."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.store.faulty_store import FaultyStore, load, save

from rewarm.store import layout, writer, writing
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import SYNC, WRITE
from rewarm.store.layout import Kind
from rewarm.store.opening import open_store
from rewarm.store.pool import Pool
from rewarm.store.writer import COUNT_SHARE, LATE_SHARE, Writer
from rewarm.testing import make_keys, payload
from rewarm.testing.faulty import failure, late, stall

SIZE = 16 << 10
BIG = 1 << 20
"""As long as a segment of the pool here."""

WAIT_S = 60.0
STORED, FULL, LOST, TIMED_OUT = Outcome.STORED, Outcome.REFUSED_FULL, Outcome.LOST_MEDIUM, Outcome.TIMED_OUT
HIT = Outcome.HIT


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path, "&poll=1h&lease=1h") as one:
        yield one


def writers(root: Path) -> list[str]:
    return sorted(os.listdir(root / "writers"))


def age(faulty: FaultyStore, share: float) -> None:
    """Let this share of the lease pass without a sign of life."""
    mine = faulty.store._writes.appender.writer
    assert mine
    mine.log.signed_s -= 3600.0 / share


def held_elsewhere(root: Path, keys: list[bytes]) -> list[bool]:
    with open_store(root, namespace="faulty") as other:
        found: list[bool] = other.lookup(keys).mask.tolist()
    return found


# Late.


def test_a_write_that_ends_after_half_a_lease_is_not_published(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(3)
    assert save(faulty.store, keys[:1], SIZE) == [STORED]
    faulty.writes.next(stall(), opcode=WRITE)
    slow = faulty.store.save(keys[1:2], [payload(keys[1], SIZE)])
    while not faulty.writes.stalled():
        slow.wait_released(0.01)
    age(faulty, LATE_SHARE)
    faulty.writes.release_stalled()
    assert slow.wait(WAIT_S) == [False]
    assert slow.outcomes == [TIMED_OUT]
    assert save(faulty.store, keys[2:], SIZE) == [STORED]
    assert len(writers(tmp_path)) == 2, "it goes on under a new id"
    assert held_elsewhere(tmp_path, keys) == [True, False, True]


def test_a_writer_that_is_late_before_it_has_said_anything_leaves_nothing(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(2)
    faulty.writes.next(stall(), opcode=WRITE)
    slow = faulty.store.save(keys[:1], [payload(keys[0], SIZE)])
    while not faulty.writes.stalled():
        slow.wait_released(0.01)
    (first,) = writers(tmp_path)
    age(faulty, COUNT_SHARE)
    faulty.store._tender._count()
    age(faulty, LATE_SHARE)
    faulty.writes.release_stalled()
    assert slow.wait(WAIT_S) == [False]
    assert save(faulty.store, keys[1:], SIZE) == [STORED]
    (second,) = writers(tmp_path)
    assert second != first, "a segment without a log would count as growing for a whole lease"


def test_a_process_stopped_while_it_publishes_does_not_say_stored(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(2)
    assert save(faulty.store, keys[:1], SIZE) == [STORED]
    plain = Writer.publish

    def stopped(mine: Writer, *rest: Any) -> int:
        written = plain(mine, *rest)
        age(faulty, LATE_SHARE)
        return written

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "publish", stopped)
        assert save(faulty.store, keys[1:], SIZE) == [TIMED_OUT]
    assert save(faulty.store, keys[1:], SIZE) == [STORED]


def test_an_idle_writer_says_that_it_lives_until_it_is_too_late(faulty: FaultyStore, tmp_path: Path) -> None:
    assert save(faulty.store, make_keys(1), SIZE) == [STORED]
    (log,) = (tmp_path / "writers").glob("*/*.log")
    before = log.stat().st_size
    assert faulty.store._writes.put(writing.Command(faulty.store._writes.appender.count, drained=False))
    faulty.store.flush()
    assert log.stat().st_size == before, "nothing is due"
    age(faulty, COUNT_SHARE)
    faulty.store._tender._count()
    faulty.store.flush()
    after = log.stat().st_size
    assert after > before
    assert [frame.kind for _, frame in layout.scan_frames(memoryview(log.read_bytes()))][-1] == Kind.COUNTER
    age(faulty, LATE_SHARE)
    faulty.store._tender._count()
    faulty.store.flush()
    assert save(faulty.store, make_keys(1, "more"), SIZE) == [STORED]
    assert log.stat().st_size == after, "it may belong to somebody else by now"
    assert len(writers(tmp_path)) == 2


def test_a_slow_look_at_the_pool_costs_no_lease(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, files = make_keys(2), Pool.files
    with FaultyStore(tmp_path, "&poll=1h") as other:
        assert save(other.store, make_keys(1, "other"), SIZE) == [STORED]
        assert save(faulty.store, keys[:1], BIG) == [STORED]
        mine = faulty.store._writes.appender.writer

        def slow(pool: Pool, *rest: Any) -> Any:
            age(faulty, 3)
            return files(pool, *rest)

        monkeypatch.setattr(Pool, "files", slow)
        assert save(faulty.store, keys[1:], BIG) == [STORED]
        monkeypatch.undo()
        assert faulty.store._writes.appender.writer is mine, "a third of the lease for each of two writers"


def test_a_living_writer_that_was_adopted_goes_on_under_a_new_id(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(2)
    assert save(faulty.store, keys[:1], SIZE) == [STORED]
    (old,) = writers(tmp_path)
    (log,) = (tmp_path / "writers").glob("*/*.log")
    with FaultyStore(tmp_path, "&poll=1h") as other:
        assert other.store._tailer.adopt(old, 3600.0) is False, "it has just written"
        assert os.listdir(tmp_path / "writers" / old).count("adopted") == 0
        assert other.store._tailer.adopt(old, None)
    end = log.stat().st_size
    faulty.store.refresh()
    assert save(faulty.store, keys[1:], SIZE) == [STORED]
    assert log.stat().st_size == end, "nothing is appended to what another has taken over"
    assert len(writers(tmp_path)) == 2
    assert load(faulty.store, keys, SIZE) == [HIT] * 2
    assert held_elsewhere(tmp_path, keys) == [True] * 2


def test_an_own_directory_that_goes_and_comes_back(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(2)
    assert save(faulty.store, keys, SIZE) == [STORED] * 2
    (mine,) = writers(tmp_path)
    faulty.store.refresh()
    os.rename(tmp_path / "writers" / mine, tmp_path / "writers" / "away")
    faulty.store.refresh()
    assert not faulty.store.lookup(keys).mask.any()
    os.rename(tmp_path / "writers" / "away", tmp_path / "writers" / mine)
    faulty.store.refresh()
    assert load(faulty.store, keys, SIZE) == [HIT] * 2


# A writer that cannot be made, or only at the second try.


def test_no_room_for_a_log_leaves_no_directory(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_files(monkeypatch, ".log", errno.ENOSPC, 100)
    assert save(faulty.store, make_keys(1), SIZE) == [FULL]
    assert writers(tmp_path) == []


def test_a_new_log_that_is_taken_for_a_dead_ones_is_made_again(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, removed = writer._lock, []

    def removing(descriptor: int) -> None:
        if len(removed) < writer.MAKE_ATTEMPTS - 1:
            removed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.unlink(removed[-1])
        plain(descriptor)

    monkeypatch.setattr(writer, "_lock", removing)
    keys = make_keys(1)
    assert save(faulty.store, keys, SIZE) == [STORED]
    assert len(removed) == writer.MAKE_ATTEMPTS - 1
    assert len(writers(tmp_path)) == 1
    assert held_elsewhere(tmp_path, keys) == [True]


@pytest.mark.parametrize(
    ("error", "times", "outcome"), [("ENOLCK", 1, STORED), ("EAGAIN", 3, STORED), ("EAGAIN", 9, LOST)]
)
def test_a_lock_on_the_log_that_is_refused(
    faulty: FaultyStore, error: str, times: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = fcntl.flock, [getattr(errno, error)] * times

    def refusing(descriptor: int, how: int) -> None:
        if left:
            raise OSError(left.pop(), error)
        plain(descriptor, how)

    monkeypatch.setattr(writer, "LOCK_ATTEMPTS", 9)
    monkeypatch.setattr(writer, "LOCK_PAUSE_S", 0.0)
    monkeypatch.setattr(fcntl, "flock", refusing)
    assert save(faulty.store, make_keys(1), SIZE) == [outcome]
    assert not left
    assert save(faulty.store, make_keys(1, "more"), SIZE) == [STORED]


def test_a_log_whose_mount_has_died_is_left(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(faulty.store, make_keys(1), SIZE) == [STORED]
    mine = faulty.store._writes.appender.writer
    assert mine
    plain, dead = os.fstat, str(mine.log.path)

    def refusing(descriptor: int) -> os.stat_result:
        if os.readlink(f"/proc/self/fd/{descriptor}") == dead:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return plain(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", refusing)
        assert save(faulty.store, make_keys(1, "more"), SIZE) == [STORED]
    assert len(writers(tmp_path)) == 2


# A medium without room.


def refuse_files(monkeypatch: pytest.MonkeyPatch, suffix: str, error: int, times: int) -> None:
    """So many files of this kind cannot be made."""
    plain, left = Pool.create_file, [error] * times

    def refusing(pool: Pool, path: Path, *rest: Any, **more: Any) -> int:
        if path.suffix == suffix and left:
            raise OSError(left.pop(), "refused")
        return plain(pool, path, *rest, **more)

    monkeypatch.setattr(Pool, "create_file", refusing)


def fill_three_segments(faulty: FaultyStore) -> list[bytes]:
    keys = make_keys(3, "old")
    for key in keys:
        assert save(faulty.store, [key], BIG) == [STORED]
    faulty.store.flush()  # the first two are sealed now
    return keys


def test_a_write_without_room_is_tried_again_behind_an_eviction(faulty: FaultyStore) -> None:
    old, new = fill_three_segments(faulty), make_keys(1, "new")
    faulty.writes.next(failure(errno.ENOSPC), opcode=WRITE)
    assert save(faulty.store, new, SIZE) == [STORED]
    assert load(faulty.store, new, SIZE) == [HIT]
    assert faulty.store.lookup(old).mask.tolist() == [False, True, True], "the oldest made room"


def test_a_write_without_room_is_refused_where_nothing_can_be_measured(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fill_three_segments(faulty)
    assert save(faulty.store, make_keys(1, "opens a segment"), SIZE) == [STORED]

    def refused(step: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(faulty.store._evictor, "measure", refused)
        faulty.writes.next(failure(errno.ENOSPC), opcode=WRITE)
        assert save(faulty.store, make_keys(1, "new"), SIZE) == [FULL]
    assert faulty.store.lookup(old).mask.all()
    assert save(faulty.store, make_keys(1, "new"), SIZE) == [STORED]


def test_a_segment_without_room_is_made_behind_an_eviction(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fill_three_segments(faulty), make_keys(1, "new")
    refuse_files(monkeypatch, ".seg", errno.ENOSPC, 1)
    drop = faulty.store._evictor._drop

    def while_others_write(*args: Any, **more: Any) -> int:
        (tmp_path / "writers" / writers(tmp_path)[0] / "99999999.log").write_bytes(bytes(8192))
        return drop(*args, **more)

    # A pool that grows a little at the same time, as by a lease's counter, costs no second victim.
    monkeypatch.setattr(faulty.store._evictor, "_drop", while_others_write)
    assert save(faulty.store, new, BIG) == [STORED]
    assert faulty.store.lookup(old).mask.tolist() == [False, True, True]


@pytest.mark.parametrize(("error", "outcome"), [(0, FULL), (errno.ENOSPC, FULL), (errno.EIO, LOST)])
def test_a_segment_whose_header_cannot_be_written_leaves_no_file(
    faulty: FaultyStore, tmp_path: Path, error: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.pwritev

    def refusing(descriptor: int, buffers: Any, offset: int, *rest: int) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith(".seg"):
            return plain(descriptor, buffers, offset, *rest)
        if error:
            raise OSError(error, os.strerror(error))
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refusing)
        assert save(faulty.store, make_keys(1), SIZE) == [outcome]
    assert not list((tmp_path / "writers").glob("*/*.seg"))
    assert save(faulty.store, make_keys(1), SIZE) == [STORED]


def test_a_segment_that_cannot_be_removed_frees_nothing(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_three_segments(faulty)
    plain = os.unlink

    def refusing(path: Any, *rest: Any, **more: Any) -> None:
        if str(path).endswith(".seg"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        plain(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing)
        assert faulty.store.evict(0) == 0
    assert len(list((tmp_path / "writers").glob("*/*.seg"))) == 3
    assert faulty.store.stats().evicted_segments == 0
    assert faulty.store.evict(0) > 0, "the next one takes what was announced and left"


# Syncs.


def test_what_is_written_is_synced_on_the_way(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty.store.sync_first = False
    monkeypatch.setattr(writing, "SYNC_BYTES", 2 * SIZE)
    faulty.writes.next(late(0.0), count=9, opcode=SYNC)
    for key in make_keys(5):
        assert save(faulty.store, [key], SIZE) == [STORED]
    faulty.store.flush()
    assert faulty.writes.injected.total() == 4, "the segment and the log, after every second block"


def test_a_segment_whose_last_sync_fails_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, plain = make_keys(2), os.fdatasync

    def refusing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".seg"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain(descriptor)

    with FaultyStore(tmp_path, "&poll=1h") as faulty:
        assert save(faulty.store, keys, SIZE) == [STORED] * 2
        monkeypatch.setattr(os, "fdatasync", refusing)
    (log,) = (tmp_path / "writers").glob("*/*.log")
    assert Kind.SEALED not in [frame.kind for _, frame in layout.scan_frames(memoryview(log.read_bytes()))]
    assert held_elsewhere(tmp_path, keys) == [True] * 2
