"""Saves where directories go, the disk is full or the loop has a defect: refusals, and never a wait for ever."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.faulty_store import WAIT_S, FaultyStore, load, save

from rewarm.errors import StorageError
from rewarm.store import writing
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import SYNC, WRITE
from rewarm.store.layout import PAGE
from rewarm.store.opening import open_store
from rewarm.store.saving import Command
from rewarm.testing import make_keys, payload
from rewarm.testing.faulty import stall

SIZE = 16 << 10
STORED, ALREADY, FULL, LOST = Outcome.STORED, Outcome.ALREADY, Outcome.REFUSED_FULL, Outcome.LOST_MEDIUM
HIT, MISSING, TIMED_OUT = Outcome.HIT, Outcome.MISSING, Outcome.TIMED_OUT


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path, "&poll=1h") as one:
        yield one


def writers(root: Path) -> list[str]:
    return sorted(os.listdir(root / "writers"))


# Directories that go.


def test_saves_go_on_in_new_files_where_the_writer_was_removed(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(4)
    save(faulty.store, keys[:2], SIZE)
    (before,) = writers(tmp_path)
    shutil.rmtree(tmp_path / "writers" / before)
    assert save(faulty.store, keys[2:], SIZE) == [STORED] * 2
    assert before not in writers(tmp_path)
    assert load(faulty.store, keys[:2], SIZE) in ([HIT] * 2, [MISSING] * 2)
    with open_store(tmp_path, namespace="faulty") as other:
        assert other.lookup(keys).mask.tolist() == [False, False, True, True]


def test_saves_go_on_in_a_new_segment_where_the_open_one_was_removed(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(4)
    save(faulty.store, keys[:2], SIZE)
    for segment in (tmp_path / "writers").glob("*/*.seg"):
        segment.unlink()
    assert save(faulty.store, keys[2:], SIZE) == [STORED] * 2
    with open_store(tmp_path, namespace="faulty") as other:
        assert other.lookup(keys).mask.tolist() == [False, False, True, True]


def test_a_pool_that_is_gone_refuses_and_may_come_back(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(3)
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    tmp_path.rename(elsewhere)
    assert save(faulty.store, keys[:2], SIZE) == [LOST] * 2
    with pytest.raises(StorageError):
        faulty.store.flush()
    elsewhere.rename(tmp_path)
    assert save(faulty.store, keys, SIZE) == [STORED] * 3
    assert load(faulty.store, keys, SIZE) == [HIT] * 3


def test_a_start_that_fails_leaves_no_writer(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/proc/self/fd"))
    for name in ("pwritev", "fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            for _ in range(3):
                assert save(faulty.store, make_keys(1), SIZE) == [FULL]
        assert writers(tmp_path) == []
        assert list(tmp_path.rglob(".tmp-*")) == []
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "but for the device's own"
    assert save(faulty.store, make_keys(1), SIZE) == [STORED]


# A disk that is really full.


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """16 MiB of tmpfs."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs root and mounts")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def fill(path: Path) -> None:
    """Take every byte that is left."""
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            while True:
                try:
                    if file.write(bytes(size)) < size:
                        break
                except OSError:
                    break


def test_a_full_disk_refuses_saves_and_serves_loads(tiny_disk: Path) -> None:
    kept, more = make_keys(20, "kept"), make_keys(20, "more")
    with FaultyStore(tiny_disk, capacity=64 << 20) as one:
        assert save(one.store, kept, SIZE) == [STORED] * 20
        fill(tiny_disk / "ballast")
        assert save(one.store, more, 60_000) == [FULL] * 20
        assert load(one.store, kept, SIZE) == [HIT] * 20
        (tiny_disk / "ballast").unlink()
        assert save(one.store, more, SIZE) == [STORED] * 20
        assert load(one.store, [*kept, *more], SIZE) == [HIT] * 40
    with FaultyStore(tiny_disk, capacity=64 << 20) as one:
        fill(tiny_disk / "ballast")
        assert save(one.store, make_keys(1, "new"), SIZE) == [FULL], "no room for a writer"
        assert load(one.store, [*kept, *more], SIZE) == [HIT] * 40
        (tiny_disk / "ballast").unlink()
        assert save(one.store, make_keys(1, "new"), SIZE) == [STORED]


def test_a_pool_larger_than_its_disk_lives_on_what_there_is(tiny_disk: Path) -> None:
    keys = make_keys(600)
    with FaultyStore(tiny_disk, capacity=256 << 20) as one:
        for start in range(0, 600, 20):
            batch = keys[start : start + 20]
            assert save(one.store, batch, 60_000) == [STORED] * 20
            assert load(one.store, batch, 60_000) == [HIT] * 20
        assert shutil.disk_usage(tiny_disk).free >= 0.02 * (16 << 20) - 4096
        assert one.store.stats().evicted_segments > 0


def test_what_is_written_and_not_synced_is_counted_once(tiny_disk: Path) -> None:
    """Memory acknowledges from a cache, so a sync comes before the frame; what it waits for is on the disk already."""
    with FaultyStore(tiny_disk, "&poll=1h") as one:
        one.writes.next(stall(), opcode=SYNC)
        transfer = one.store.save(make_keys(1), [bytes(SIZE)])
        while not one.writes.stalled():
            transfer.wait_released(0.01)
        assert one.store._writes._unwritten_bytes() == PAGE, "the frame that will name it"
        one.store.counts_written = False
        assert one.store._writes._unwritten_bytes() == PAGE + SIZE, "as far as a network mount says"
        one.writes.release_stalled()
        assert transfer.wait(WAIT_S) == [True]


# Defects of our own.


def test_a_defect_in_the_loop_gives_everybody_a_verdict(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, more = make_keys(2, "kept"), make_keys(5, "more")
    save(faulty.store, kept, SIZE)
    faulty.writes.next(stall(), opcode=WRITE)
    first = faulty.store.save(more[:1], [payload(more[0], SIZE)])
    while not faulty.writes.stalled():
        first.wait_released(0.01)
    follower = faulty.store.save(more[:1], [payload(more[0], SIZE)])

    def defect(*_: object) -> None:
        raise MemoryError("a defect")

    monkeypatch.setattr(writing.Group, "prepare", defect)
    second = faulty.store.save(more[1:], [payload(key, SIZE) for key in more[1:]])
    for transfer in (first, follower, second):
        assert not any(transfer.wait(WAIT_S))
        assert set(transfer.outcomes) == {LOST}
    assert not first.released(), "the kernel may still read it"
    faulty.heal()
    for transfer in (first, follower, second):
        assert transfer.wait_released(WAIT_S)
    assert save(faulty.store, more, SIZE) == [LOST] * 5
    for command in (faulty.store.flush, faulty.store.erase, lambda: faulty.store.evict(0)):
        with pytest.raises(StorageError, match="rewarm-write: MemoryError: a defect"):
            command()
    assert "rewarm-write: MemoryError: a defect" in faulty.store.stats().notes
    assert faulty.store.stats().unreleased_bytes == faulty.store.stats().queued_bytes == 0
    assert load(faulty.store, kept, SIZE) == [HIT] * 2, "loads go on"


def test_a_defect_in_a_command_is_for_who_asked(faulty: FaultyStore) -> None:
    def defect() -> int:
        raise ZeroDivisionError("a defect")

    for drained in (True, False):
        command = Command(defect, drained=drained)
        assert faulty.store._writes.put(command)
        with pytest.raises(ZeroDivisionError):
            command.future.result(WAIT_S)
    assert save(faulty.store, make_keys(1), SIZE) == [STORED]


def test_a_device_that_fails_as_a_whole_is_said(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(faulty.store, make_keys(1), SIZE)

    def refuse(*_: object) -> None:
        raise StorageError("the ring is gone")

    with monkeypatch.context() as patch:
        patch.setattr(faulty.writes, "submit", refuse)
        assert save(faulty.store, make_keys(1, "more"), SIZE) == [LOST]
    assert "rewarm-write: the ring is gone" in faulty.store.stats().notes
    assert "rewarm-write: the ring is gone; " in caplog.text


def test_a_mount_that_fails_a_close_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FUSE and NFS report trouble even there; the descriptor is closed all the same, and the loop goes on."""
    close = os.close

    def fail(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if name.endswith((".seg", ".log")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    keys = make_keys(8)
    with FaultyStore(tmp_path, "&poll=1h", capacity=4 << 20) as faulty:
        monkeypatch.setattr(os, "close", fail)
        assert save(faulty.store, keys, SIZE) == [STORED] * 8
        assert load(faulty.store, keys, SIZE) == [HIT] * 8
        faulty.store.flush()
        monkeypatch.undo()
        assert not [note for note in faulty.store.stats().notes if note.startswith("rewarm-")]
