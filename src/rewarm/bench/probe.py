"""The raw ceiling of media: reads, writes and a mixture without a store, block size by bytes in flight.

It writes one file of incompressible bytes in a scratch directory on each, bounded by the free space, and reads and
rewrites it past the page cache, each cell bounded by time. Blocks are taken in random order. Several media are measured
one by one and then all at the same time. Unless `full` it is a short test: a drive that has a fast region for new
writes shows that region; `full` wears the media in first, see `precondition`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from rewarm.bench.precondition import STEADY_S_MAX, Steady, precondition
from rewarm.bench.raw import Extent, RawReading, make_operations, random_arena, run_raw
from rewarm.bench.scratch import Scratch
from rewarm.bench.stages import Stages
from rewarm.errors import ConfigError, StorageError
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
MIXED = "mixed"
MIXED_READ_SHARE = 0.7
"""Of the operations of a mixture: restores beside saves."""
TOGETHER_PASSES = 16
"""A drive sixteen times as fast as another still has work while both are measured."""
FULL_ROOM_SHARE = 0.9
"""What a full probe takes of the room: steady state is that of a drive that is nearly full."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from submission to completion as this process saw it, nearest rank."""

    p50: float
    p90: float
    p99: float
    max: float


class ProbeReading(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. `latency_histogram` has [upper bound in s, operations] for every bucket that is not empty.

    `operation` is `read`, `write` or `mixed` (seven reads to three writes). `path` is null for all media together, each
    with its best pattern: then block and bytes in flight are those of the first.
    """

    path: str | None
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
    """For reads, alone or in a mixture: `proven`, `not_provable` or `failed`."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `rewarm probe -o` writes, schema 1. The two rates are the best cells, of several media all together.

    `medium`, `device`, `device_refusals`, `file_bytes` and `steady` are those of the first, `media` has all.
    """

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
    media: list[Medium] = []
    steady: Steady | None = None

    @property
    def failures(self) -> list[str]:
        """Readings that must not be believed."""
        return [
            f"{reading.path or 'together'}: {reading.operation} of {format_size(reading.block_bytes)} blocks: not cold"
            for reading in self.readings
            if reading.cold == "failed"
        ]


@dataclass(frozen=True)
class _Drive:
    """One medium under test, its file open for raw I/O."""

    medium: Medium
    choice: Choice
    counting: Counting
    path: Path
    extent: Extent


def run_probe(
    directories: Sequence[Path], stages: Stages, tell: Callable[[str], None], *, seed: int = 0, full: bool = False
) -> ProbeResult:
    """Measure the media under `directories`; everything written is removed, `tell` hears of it.

    Raises `ConfigError` for a directory that does not exist or stands twice, `StorageError` when there is no room or
    I/O fails.
    """
    media = _media(directories)
    sizes = [file_bytes(medium, full=full) for medium in media]
    readings: list[ProbeReading] = []
    steady: list[Steady] = []
    with ExitStack() as stack:
        drives = [_prepared(stack, medium, size, tell) for medium, size in zip(media, sizes, strict=True)]
        for number, drive in enumerate(drives):
            steady += _written(drive, [seed, number], stages, full)
            readings += _matrix(drive, seed, stages)
        if len(drives) > 1:
            with stages("all at the same time", 0) as progress:
                together = [_together(drives, readings, operation, seed) for operation in ("read", "write")]
                progress.advance(0)
            readings += together
    tops = [reading for reading in readings if reading.path is None] or readings
    return ProbeResult(
        schema=SCHEMA,
        version=package_version(),
        host=host_facts(),
        seed=seed,
        medium=media[0],
        device=drives[0].choice.name,
        device_refusals=drives[0].choice.refusals,
        file_bytes=sizes[0],
        read_bytes_per_s=_top(tops, "read"),
        write_bytes_per_s=_top(tops, "write"),
        readings=readings,
        notes=[note for drive in drives for note in _notes(drive, steady)],
        media=media,
        steady=steady[0] if steady else None,
    )


def _media(directories: Sequence[Path]) -> list[Medium]:
    if len(set(map(os.path.realpath, directories))) < len(directories):
        raise ConfigError("a directory stands twice; each is measured once")
    for directory in directories:
        if str(directory).startswith("block:") or (directory.exists() and not directory.is_dir()):
            device = os.path.abspath(str(directory).removeprefix("block:"))
            raise ConfigError(
                f"{directory} is no directory, and a probe writes: it is not tried on a device. A raw pool there is "
                f"read, its ceiling too, by: rewarm bench --target NAME=block://{device} .."
            )
    return [medium_of(directory) for directory in directories]


def _prepared(stack: ExitStack, medium: Medium, size: int, tell: Callable[[str], None]) -> _Drive:
    """A scratch directory and an open file on a medium; both go with `stack`."""
    scratch = stack.enter_context(Scratch(Path(medium.path), tell))
    choice = choose_device(scratch.path, depth=DEPTH_MAX)
    path = scratch.path / "probe"
    extent = stack.enter_context(_opened(path, choice, size))
    return _Drive(medium, choice, try_counting(scratch.path, medium), path, extent)


def _written(drive: _Drive, seed: list[int], stages: Stages, full: bool) -> list[Steady]:
    """Write the file once, or wear the medium in."""
    if full:
        found = [precondition(drive.extent, drive.choice, seed[0] + seed[1], stages)]
        os.fsync(drive.extent.descriptor)
        return found
    with stages(f"{drive.medium.path}: writing the file", drive.extent.size) as progress:
        _fill(drive.extent, drive.choice, seed[0] + seed[1], progress.advance)
    return []


def file_bytes(medium: Medium, *, full: bool = False) -> int:
    """How large a file the medium has room for. Raises `StorageError` when that is too small to measure anything."""
    room = medium.free_bytes - int(FREE_SHARE * medium.size_bytes)
    wanted = int(room * FULL_ROOM_SHARE) if full else min(FILE_BYTES_MAX, int(room * ROOM_SHARE))
    size = wanted // FILE_BYTES_MIN * FILE_BYTES_MIN
    if size < FILE_BYTES_MIN:
        raise StorageError(
            f"{medium.path} has {format_size(max(0, room))} to give and a probe needs "
            f"{format_size(FILE_BYTES_MIN / ROOM_SHARE)}; free some space or probe another directory"
        )
    return size


def _notes(drive: _Drive, steady: Sequence[Steady]) -> list[str]:
    where = drive.medium.path
    size = format_size(drive.extent.size)
    notes = [f"{where}: a file of {size}, blocks in random order, at most {CELL_S_MAX:.0f} s per cell"]
    if drive.counting.reason:
        notes.append(f"{where}: cold reads are not provable: {drive.counting.reason}")
    if any(not worn.reached for worn in steady):
        notes.append(f"a medium was not steady after {STEADY_S_MAX / 60:.0f} minutes of writing; measured as it was")
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


def _cells() -> list[tuple[str, int, int]]:
    """(operation, block, bytes in flight): reads first, on the file as it was written; mixtures with many in flight."""
    cells = [
        (operation, block, max(block, in_flight))
        for operation in ("read", "write")
        for block in BLOCK_BYTES
        for in_flight in IN_FLIGHT_BYTES
        if in_flight == 0 or in_flight > block
    ]
    return cells + [(MIXED, block, max(block, IN_FLIGHT_BYTES[-1])) for block in BLOCK_BYTES]


def _matrix(drive: _Drive, seed: int, stages: Stages) -> list[ProbeReading]:
    """Every cell of one medium."""
    cells = _cells()
    arena = random_arena(max(IN_FLIGHT_BYTES), seed)
    readings = []
    with stages(f"{drive.medium.path}: reading and writing", len(cells) * drive.extent.size) as progress:
        for number, (operation, block, in_flight) in enumerate(cells):
            operations = _operations(drive.extent, operation, block, np.random.default_rng([seed, number]))
            drop_page_cache([drive.path])
            before = take_snapshot(drive.medium.device_number)
            # No cell writes a sector that an earlier one has written: an array that deduplicates must store them all.
            first_stamp = (number + 1) * FILE_BYTES_MAX // SECTOR_BYTES
            reading = _run(drive.choice, operations, arena, in_flight // block, CELL_S_MAX, first_stamp)
            counted = take_snapshot(drive.medium.device_number).since(before)
            claim = Claim(payload=reading.read_bytes, padding=0, log=0)
            cold = judge(claim, counted, drive.counting)[0] if reading.read_bytes else None
            readings.append(_book(drive.medium.path, operation, block, in_flight, reading, cold))
            progress.advance(drive.extent.size)
    return readings


def _operations(extent: Extent, operation: str, block: int, order: np.random.Generator) -> npt.NDArray[np.void]:
    """Every block of the file once, in random order."""
    operations = make_operations([extent], WRITE if operation == "write" else READ, block, order)
    if operation == MIXED:
        operations["opcode"] = np.where(order.random(len(operations)) < MIXED_READ_SHARE, READ, WRITE)
    return operations


def _together(drives: Sequence[_Drive], known: Sequence[ProbeReading], operation: str, seed: int) -> ProbeReading:
    """All media at the same time, each with its best pattern, for as long as a cell may take; every byte counts over
    the time to the last of them."""
    mine = [[r for r in known if (r.path, r.operation) == (drive.medium.path, operation)] for drive in drives]
    patterns = [max(readings, key=lambda reading: reading.bytes_per_s) for readings in mine]
    work = []
    for number, (drive, pattern) in enumerate(zip(drives, patterns, strict=True)):
        once = _operations(drive.extent, operation, pattern.block_bytes, np.random.default_rng([seed, number]))
        arena = random_arena(max(IN_FLIGHT_BYTES), seed + number)
        # Round and round, so that a fast one does not stop before a slow one.
        work.append(
            (drive.choice, np.tile(once, TOGETHER_PASSES), arena, pattern.in_flight_bytes // pattern.block_bytes)
        )
        drop_page_cache([drive.path])
    before = take_snapshot()
    with ThreadPoolExecutor(len(drives)) as pool:
        first_stamp = (len(_cells()) + 1) * FILE_BYTES_MAX // SECTOR_BYTES
        running = [pool.submit(_run, *one, CELL_S_MAX, first_stamp + n * (1 << 40)) for n, one in enumerate(work)]
        readings = [future.result() for future in running]
    counted = take_snapshot().since(before)
    seconds = max(reading.seconds for reading in readings)
    total = RawReading(
        bytes_moved=sum(reading.bytes_moved for reading in readings),
        operations=sum(reading.operations for reading in readings),
        read_bytes=sum(reading.read_bytes for reading in readings),
        seconds=seconds,
        cpu_s=counted.cpu_s,
        latencies_s=np.concatenate([reading.latencies_s for reading in readings]),
    )
    counting = next((drive.counting for drive in drives if drive.counting.reason), Counting(process=True, device=False))
    claim = Claim(payload=total.read_bytes, padding=0, log=0)
    cold = judge(claim, counted, counting)[0] if total.read_bytes else None
    return _book(None, operation, patterns[0].block_bytes, patterns[0].in_flight_bytes, total, cold)


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


def _book(
    path: str | None, operation: str, block: int, in_flight: int, reading: RawReading, cold: str | None
) -> ProbeReading:
    ranks = np.percentile(reading.latencies_s, [50, 90, 99, 100], method="inverted_cdf").tolist()
    return ProbeReading(
        path=path,
        operation=operation,
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
