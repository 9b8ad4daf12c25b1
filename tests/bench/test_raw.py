"""Raw reads and writes: the right bytes move, time is bounded, failures are failures."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rewarm.bench.ceiling import Pattern, best, measure_ceiling
from rewarm.bench.counters import take_snapshot
from rewarm.bench.payload import SECTOR_BYTES
from rewarm.bench.raw import Extent, make_arena, make_operations, random_arena, run_raw
from rewarm.errors import StorageError
from rewarm.store.devices.base import READ, WRITE
from rewarm.store.devices.threads import ThreadsDevice
from rewarm.testing import FaultyDevice
from rewarm.testing.faulty import failure, short

KIB, MIB = 1 << 10, 1 << 20
SIZE = 4 * MIB


@pytest.fixture
def extent(tmp_path: Path) -> Iterator[Extent]:
    path = tmp_path / "f"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    descriptor = os.open(path, os.O_RDWR)
    yield Extent(descriptor, SIZE)
    os.close(descriptor)


def test_one_pass_reads_every_block_once(extent: Extent) -> None:
    device = ThreadsDevice(32)
    operations = make_operations([extent], READ, 64 * KIB, np.random.default_rng(3))
    assert sorted(operations["offset"].tolist()) == list(range(0, SIZE, 64 * KIB))
    arena = make_arena(SIZE)
    reading = run_raw(device, operations, arena, SIZE // (64 * KIB), limit_s=60)
    device.close()
    assert reading.bytes_moved == SIZE
    assert reading.operations == len(reading.latencies_s) == 64
    assert reading.latencies_s.min() > 0
    assert reading.latencies_s.max() <= reading.seconds
    assert reading.bytes_per_s == pytest.approx(SIZE / reading.seconds)


def test_blocks_land_in_memory_of_their_own(extent: Extent) -> None:
    device = ThreadsDevice(8)
    arena = make_arena(8 * 512 * KIB)
    run_raw(device, make_operations([extent], READ, 512 * KIB, None), arena, 8, limit_s=60)
    device.close()
    assert arena.tobytes() == os.pread(extent.descriptor, SIZE, 0)


def test_no_block_starts_after_the_limit_and_all_are_counted(extent: Extent) -> None:
    device = ThreadsDevice(4)
    reading = run_raw(device, make_operations([extent], READ, 64 * KIB, None), make_arena(256 * KIB), 4, limit_s=1e-9)
    device.close()
    assert reading.operations == len(reading.latencies_s) == 4
    assert reading.bytes_moved == 256 * KIB


def test_every_sector_that_is_written_is_another_one(extent: Extent) -> None:
    device = ThreadsDevice(4)
    operations = make_operations([extent], WRITE, 64 * KIB, None)
    run_raw(device, operations, random_arena(256 * KIB, seed=1), 4, limit_s=60)
    device.close()
    written = os.pread(extent.descriptor, SIZE, 0)
    assert len({written[at : at + SECTOR_BYTES] for at in range(0, SIZE, SECTOR_BYTES)}) == SIZE // SECTOR_BYTES


@pytest.mark.parametrize(
    ("fault", "message"), [(failure(errno.EIO), "Input/output error"), (short(), r"only \d+ of 65536")]
)
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_failing_medium_has_no_ceiling(extent: Extent, fault: object, message: str, opcode: int) -> None:
    device = FaultyDevice(ThreadsDevice(4), seed=1)
    device.at(9, fault)  # type: ignore[arg-type]
    with pytest.raises(StorageError, match=message):
        run_raw(device, make_operations([extent], opcode, 64 * KIB, None), make_arena(256 * KIB), 4, limit_s=60)
    assert device.in_flight() == 0, "memory must not be freed under the kernel"
    device.close()


def test_the_ceiling_is_read_cold_from_the_files_given(counted: Path) -> None:
    files = [counted / "a", counted / "b"]
    for path in files:
        path.write_bytes(os.urandom(SIZE))
    before = take_snapshot()
    readings = measure_ceiling(files, [Pattern(64 * KIB, 1 * MIB), Pattern(1 * MIB, 4 * MIB)], start=0.5)
    read_bytes = take_snapshot().since(before).process_read_bytes
    assert read_bytes is not None
    assert 4 * SIZE <= read_bytes <= 4 * SIZE + 64 * KIB, "choosing the device reads a few sectors"
    found = best(readings)
    assert found is not None
    assert found.bytes_per_s == max(reading.bytes_per_s for reading in readings) > 0


def test_files_smaller_than_every_pattern_give_no_ceiling(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(1000))
    assert measure_ceiling([tmp_path / "f"]) == []
    assert measure_ceiling([]) == []
    assert best([]) is None
