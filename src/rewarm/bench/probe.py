"""The raw ceiling of a medium: reads and writes without a store, block size by bytes in flight.

It writes one file of incompressible bytes in a scratch directory, bounded by the free space, and reads and rewrites it
past the page cache, each cell bounded by time. Blocks are taken in random order. It is a short test: a drive that has
a fast region for new writes shows that region, and steady state after hours of writing is not measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.bench.cold import Claim, Counting, drop_page_cache, judge, try_counting
from rewarm.bench.counters import take_snapshot
from rewarm.bench.histogram import histogram
from rewarm.bench.host import host_facts, package_version
from rewarm.bench.medium import Medium, medium_of
from rewarm.bench.payload import SECTOR_BYTES
from rewarm.bench.pools import FREE_SHARE
from rewarm.bench.raw import Extent, RawReading, make_operations, random_arena, run_raw
from rewarm.bench.scratch import Scratch
from rewarm.bench.stages import Stages
from rewarm.errors import StorageError
from rewarm.store.devices.base import READ, WRITE
from rewarm.store.devices.select import Choice, choose_device
from rewarm.units import format_size

SCHEMA = 1
KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (64 * KIB, 256 * KIB, 1 * MIB, 8 * MIB)
IN_FLIGHT_BYTES = (0, 1 * MIB, 8 * MIB, 64 * MIB)
"""Bytes under way at any time; 0 stands for one block at a time."""
DEPTH_MAX = 1024
"""Operations in flight: 64 MiB of 64 KiB blocks."""
FILE_BYTES_MAX = 1 << 30
FILE_BYTES_MIN = 64 * MIB
"""Below this a cell of 64 MiB in flight is over before it has begun."""
ROOM_SHARE = 0.5
"""Most of the room on the medium that the file may take."""
CELL_S_MAX = 1.0


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from submission to completion as this process saw it, nearest rank."""

    p50: float
    p90: float
    p99: float
    max: float


class ProbeReading(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. `latency_histogram` has [upper bound in s, operations] for every bucket that is not empty."""

    operation: str
    block_bytes: int
    in_flight_bytes: int
    bytes_per_s: float
    operations_per_s: float
    latency_s: Latency
    latency_histogram: list[tuple[float, int]]
    cpu_s_per_gb: float
    bytes_moved: int
    seconds: float
    cold: str | None
    """For reads: `proven`, `not_provable` or `failed`."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `rewarm probe -o` writes, schema 1. The two rates are the best cells."""

    schema: int
    version: str
    host: dict[str, Any]
    seed: int
    medium: Medium
    device: str
    device_refusals: list[str]
    file_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    readings: list[ProbeReading]
    notes: list[str]

    @property
    def failures(self) -> list[str]:
        """Readings that must not be believed."""
        return [
            f"read of {format_size(reading.block_bytes)} blocks: not cold"
            for reading in self.readings
            if reading.cold == "failed"
        ]


def run_probe(directory: Path, stages: Stages, tell: Callable[[str], None], *, seed: int = 0) -> ProbeResult:
    """Measure the medium under `directory`; everything written is removed, `tell` hears of it.

    Raises `ConfigError` for a directory that does not exist, `StorageError` when there is no room or I/O fails.
    """
    medium = medium_of(directory)
    size = file_bytes(medium)
    with Scratch(directory, tell) as scratch:
        choice = choose_device(scratch.path, depth=DEPTH_MAX)
        counting = try_counting(scratch.path, medium)
        path = scratch.path / "probe"
        with _opened(path, choice, size) as extent:
            with stages("writing the file", size) as progress:
                _fill(extent, choice, seed, progress.advance)
            readings = _matrix(path, extent, choice, medium, counting, seed, stages)
    return ProbeResult(
        schema=SCHEMA,
        version=package_version(),
        host=host_facts(),
        seed=seed,
        medium=medium,
        device=choice.name,
        device_refusals=choice.refusals,
        file_bytes=size,
        read_bytes_per_s=_top(readings, "read"),
        write_bytes_per_s=_top(readings, "write"),
        readings=readings,
        notes=_notes(size, counting),
    )


def file_bytes(medium: Medium) -> int:
    """How large a file the medium has room for. Raises `StorageError` when that is too small to measure anything."""
    room = medium.free_bytes - int(FREE_SHARE * medium.size_bytes)
    size = min(FILE_BYTES_MAX, int(room * ROOM_SHARE)) // FILE_BYTES_MIN * FILE_BYTES_MIN
    if size < FILE_BYTES_MIN:
        raise StorageError(
            f"{medium.path} has {format_size(max(0, room))} to give and a probe needs "
            f"{format_size(FILE_BYTES_MIN / ROOM_SHARE)}; free some space or probe another directory"
        )
    return size


def _notes(size: int, counting: Counting) -> list[str]:
    notes = [f"a file of {format_size(size)}, blocks in random order, at most {CELL_S_MAX:.0f} s per cell"]
    if counting.reason:
        notes.append(f"cold reads are not provable: {counting.reason}")
    return notes


def _fill(extent: Extent, choice: Choice, seed: int, advance: Callable[[float], None]) -> None:
    """Write the whole file once, in file order."""
    part = FILE_BYTES_MIN
    arena = random_arena(16 * MIB, seed)
    for first in range(0, extent.size, part):
        operations = make_operations([Extent(extent.descriptor, part)], WRITE, MIB, None)
        operations["offset"] += first
        _run(choice, operations, arena, 16, float("inf"), first // SECTOR_BYTES)
        advance(part)
    os.fsync(extent.descriptor)


def _matrix(
    path: Path, extent: Extent, choice: Choice, medium: Medium, counting: Counting, seed: int, stages: Stages
) -> list[ProbeReading]:
    """Every cell: reads first, on the file as it was written."""
    cells = [
        (opcode, block, max(block, in_flight))
        for opcode in (READ, WRITE)
        for block in BLOCK_BYTES
        for in_flight in IN_FLIGHT_BYTES
        if in_flight == 0 or in_flight > block
    ]
    arena = random_arena(max(IN_FLIGHT_BYTES), seed)
    readings = []
    with stages("reading and writing", len(cells) * extent.size) as progress:
        for number, (opcode, block, in_flight) in enumerate(cells):
            operations = make_operations([extent], opcode, block, np.random.default_rng([seed, number]))
            drop_page_cache([path])
            before = take_snapshot(medium.device_number)
            # No cell writes a sector that an earlier one has written: an array that deduplicates must store them all.
            first_stamp = (number + 1) * FILE_BYTES_MAX // SECTOR_BYTES
            reading = _run(choice, operations, arena, in_flight // block, CELL_S_MAX, first_stamp)
            counted = take_snapshot(medium.device_number).since(before)
            claim = Claim(payload=reading.bytes_moved, padding=0, log=0)
            cold = judge(claim, counted, counting)[0] if opcode == READ else None
            readings.append(_book(opcode, block, in_flight, reading, cold))
            progress.advance(extent.size)
    return readings


def _run(
    choice: Choice,
    operations: npt.NDArray[np.void],
    arena: npt.NDArray[np.uint8],
    in_flight: int,
    limit_s: float,
    first_stamp: int,
) -> RawReading:
    device = choice.open()
    try:
        return run_raw(device, operations, arena, in_flight, limit_s, first_stamp=first_stamp)
    finally:
        device.close()


def _book(opcode: int, block: int, in_flight: int, reading: RawReading, cold: str | None) -> ProbeReading:
    ranks = np.percentile(reading.latencies_s, [50, 90, 99, 100], method="inverted_cdf").tolist()
    return ProbeReading(
        operation="read" if opcode == READ else "write",
        block_bytes=block,
        in_flight_bytes=in_flight,
        bytes_per_s=reading.bytes_per_s,
        operations_per_s=reading.operations / reading.seconds,
        latency_s=Latency(p50=ranks[0], p90=ranks[1], p99=ranks[2], max=ranks[3]),
        latency_histogram=histogram(reading.latencies_s),
        cpu_s_per_gb=reading.cpu_s / reading.bytes_moved * 1e9,
        bytes_moved=reading.bytes_moved,
        seconds=reading.seconds,
        cold=cold,
    )


def _top(readings: Sequence[ProbeReading], operation: str) -> float:
    return max(reading.bytes_per_s for reading in readings if reading.operation == operation)


@contextmanager
def _opened(path: Path, choice: Choice, size: int) -> Iterator[Extent]:
    """A new file open for raw I/O of `size` bytes."""
    path.touch(mode=0o600)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if choice.direct else 0))
    try:
        yield Extent(descriptor, size)
    finally:
        os.close(descriptor)
