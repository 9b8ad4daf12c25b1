"""The kernel's counters against reads and writes of known size, and the verdict on what was cold."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest

from rewarm.bench import counters
from rewarm.bench.cold import (
    FAILED,
    NOT_PROVABLE,
    PROVEN,
    Claim,
    Counting,
    drop_page_cache,
    judge,
    try_counting,
    working_set_note,
)
from rewarm.bench.counters import Snapshot, take_snapshot
from rewarm.bench.medium import Medium, medium_of
from rewarm.errors import ConfigError

MIB = 1 << 20
COUNTED = Counting(process=True, device=True)


def written(path: Path, size: int = 8 * MIB) -> Path:
    """A file of random bytes that are on the medium; its pages are still cached."""
    path.write_bytes(os.urandom(size))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return path


def read(path: Path, size: int, flags: int = 0) -> None:
    buffer = mmap.mmap(-1, size)
    descriptor = os.open(path, os.O_RDONLY | flags)
    assert os.preadv(descriptor, [buffer], 0) == size
    os.close(descriptor)


def snapshot(process: int | None, device: int | None = None) -> Snapshot:
    return Snapshot(
        at_s=1,
        process_read_bytes=process,
        process_write_bytes=0,
        device_read_bytes=device,
        device_write_bytes=0,
        cpu_s=0,
    )


def test_direct_reads_are_counted_to_the_byte(counted: Path) -> None:
    path, device = written(counted / "f"), medium_of(counted).device_number
    before = take_snapshot(device)
    read(path, 8 * MIB, os.O_DIRECT)
    moved = take_snapshot(device).since(before)
    assert moved.process_read_bytes == 8 * MIB
    assert moved.device_read_bytes is not None
    assert moved.device_read_bytes >= 8 * MIB


def test_reads_of_every_thread_are_counted(counted: Path) -> None:
    path = written(counted / "f")
    before = take_snapshot()
    threads = [threading.Thread(target=read, args=(path, 4 * MIB, os.O_DIRECT)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert take_snapshot().since(before).process_read_bytes == 12 * MIB


def test_cached_pages_are_not_counted_and_dropped_ones_are(counted: Path) -> None:
    path = written(counted / "f")
    before = take_snapshot()
    read(path, 8 * MIB)
    assert take_snapshot().since(before).process_read_bytes == 0
    drop_page_cache([path, counted / "gone"])
    before = take_snapshot()
    read(path, 8 * MIB)
    assert take_snapshot().since(before).process_read_bytes == 8 * MIB


def test_a_planted_warm_read_is_found(counted: Path) -> None:
    path, medium = written(counted / "f"), medium_of(counted)
    counting = try_counting(counted, medium)
    claim = Claim(payload=8 * MIB, padding=0, log=0)
    before = take_snapshot(medium.device_number)
    read(path, 8 * MIB)
    verdict, reason = judge(claim, take_snapshot(medium.device_number).since(before), counting)
    assert verdict == FAILED
    assert "some came from memory" in reason
    drop_page_cache([path])
    before = take_snapshot(medium.device_number)
    read(path, 8 * MIB)
    assert judge(claim, take_snapshot(medium.device_number).since(before), counting)[0] == PROVEN


def test_work_costs_cpu_seconds() -> None:
    before = take_snapshot()
    while take_snapshot().since(before).cpu_s == 0:  # at most a few clock ticks
        sum(range(1000))
    assert take_snapshot().since(before).at_s > 0


def test_what_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "_PROCESS_IO", tmp_path / "nothing")
    monkeypatch.setattr(counters, "_DISKSTATS", tmp_path / "nothing")
    now = take_snapshot((1, 2))
    assert (now.process_read_bytes, now.device_read_bytes) == (None, None)
    assert now.since(now).process_read_bytes is None


@pytest.mark.parametrize(
    ("process", "device", "verdict"),
    [
        (100_000, 100_000, PROVEN),
        (100_990, 120_000, PROVEN),
        (99_010, 99_010, PROVEN),
        (98_900, 98_900, FAILED),  # some came from memory
        (101_100, 120_000, FAILED),  # something else was read
        (100_000, 90_000, FAILED),  # the device delivered less than the process got
        (100_000, None, PROVEN),
        (None, None, NOT_PROVABLE),
    ],
)
def test_the_verdict_allows_one_percent(process: int | None, device: int | None, verdict: str) -> None:
    claim = Claim(payload=96_000, padding=3_000, log=1_000)
    assert judge(claim, snapshot(process, device), COUNTED)[0] == verdict


def test_nothing_is_proven_where_the_kernel_does_not_count() -> None:
    reason = "tmpfs is memory"
    found = judge(Claim(payload=1, padding=0, log=0), snapshot(1), Counting(process=False, device=False, reason=reason))
    assert found == (NOT_PROVABLE, reason)


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "fuse.sshfs", "9p"])
def test_memory_and_network_are_not_provable_whatever_they_count(kind: str, counted: Path) -> None:
    medium = Medium(
        path=str(counted), file_system=kind, source="", device=None, device_number=None, device_model=None,
        rotational=None, backing=None, size_bytes=0, free_bytes=0,
    )  # fmt: skip
    counting = try_counting(counted, medium)
    assert not counting.process
    assert kind in (counting.reason or "")
    assert list(counted.iterdir()) == []


def test_dev_shm_is_found_to_be_memory() -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm on this machine")
    assert medium_of(shm).file_system == "tmpfs"


def test_a_medium_is_described(counted: Path) -> None:
    medium = medium_of(counted)
    assert medium.device is not None
    assert 0 < medium.free_bytes <= medium.size_bytes
    with pytest.raises(ConfigError, match="no such directory"):
        medium_of(counted / "missing")


def test_the_working_set_is_compared_with_memory() -> None:
    assert "memory could hold it" in working_set_note(1 << 20)
    assert "memory cannot hold it" in working_set_note(1 << 60)
