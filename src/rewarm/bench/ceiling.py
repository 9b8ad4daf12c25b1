"""The raw read ceiling of a medium, measured on the very files that a run restores from.

The best of a few patterns of block size and bytes in flight is the ceiling; later repeats measure that pattern again,
in between the restores, so that a medium whose speed drifts is seen to drift.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from rewarm.bench.cold import drop_page_cache
from rewarm.bench.raw import Extent, make_arena, make_operations, run_raw
from rewarm.store.devices.base import READ
from rewarm.store.devices.select import Choice, choose_device, choose_for_file
from rewarm.store.raw.media import resolve, tries_direct

KIB, MIB = 1 << 10, 1 << 20


class Pattern(msgspec.Struct, frozen=True):
    """How raw reads are issued: bytes of one read, and bytes that are under way at any time."""

    block_bytes: int
    in_flight_bytes: int


PATTERNS = (
    Pattern(256 * KIB, 8 * MIB),
    Pattern(1 * MIB, 16 * MIB),
    Pattern(1 * MIB, 64 * MIB),
    Pattern(8 * MIB, 64 * MIB),
)
READ_BYTES_MAX = 512 * MIB
"""Enough to settle for a drive of 7 GB/s, and what a slow one reads of it is bounded by time."""
READ_S_MAX = 1.0


class CeilingReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one pattern reached."""

    pattern: Pattern
    bytes_per_s: float
    cpu_s_per_gb: float


def measure_ceiling(
    files: Sequence[Path],
    patterns: Sequence[Pattern] = PATTERNS,
    *,
    limit_s: float = READ_S_MAX,
    start: float = 0.0,
    ranges: Sequence[range] | None = None,
) -> list[CeilingReading]:
    """Read `files` cold with each pattern, beginning at the share `start` of them, so that repeats read other bytes.

    With `ranges` the one file is a device, and only these bytes of it are read. Files smaller than the smallest pattern
    give an empty list. Raises `StorageError` when a read fails.
    """
    sizes = [path.stat().st_size for path in files] if ranges is None else [len(part) for part in ranges]
    usable = [p for p in patterns if max(sizes, default=0) >= p.block_bytes]
    if not usable:
        return []
    choice = _choose(files[0], device=ranges is not None)
    drop_page_cache(files)
    with _opened(files, choice, ranges) as extents:
        return [_measure(pattern, extents, choice, limit_s, start) for pattern in usable]


def _choose(file: Path, *, device: bool) -> Choice:
    if not device:
        return choose_device(file.parent, writable=False, sample=file)
    real, block = resolve(str(file))
    return choose_for_file(real, direct=tries_direct(real, block))


def best(readings: Sequence[CeilingReading]) -> CeilingReading | None:
    """The fastest reading."""
    return max(readings, key=lambda reading: reading.bytes_per_s, default=None)


def _measure(
    pattern: Pattern, extents: Sequence[Extent], choice: Choice, limit_s: float, start: float
) -> CeilingReading:
    operations = make_operations(extents, READ, pattern.block_bytes, None)
    operations = np.roll(operations, -int(start * len(operations)))
    operations = operations[: max(1, READ_BYTES_MAX // pattern.block_bytes)]
    in_flight = min(pattern.in_flight_bytes // pattern.block_bytes, len(operations))
    arena = make_arena(in_flight * pattern.block_bytes)
    device = choice.open()
    try:
        reading = run_raw(device, operations, arena, in_flight, limit_s)
    finally:
        device.close()
    return CeilingReading(
        pattern=pattern, bytes_per_s=reading.bytes_per_s, cpu_s_per_gb=reading.cpu_s / reading.bytes_moved * 1e9
    )


@contextmanager
def _opened(files: Sequence[Path], choice: Choice, ranges: Sequence[range] | None) -> Iterator[list[Extent]]:
    """The files, or ranges of the one device, open for raw reads."""
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if choice.direct else 0)
    descriptors: list[int] = []
    try:
        for path in files:
            descriptors.append(os.open(path, flags))
        if ranges is None:
            yield [Extent(descriptor, os.fstat(descriptor).st_size) for descriptor in descriptors]
        else:
            yield [Extent(descriptors[0], len(part), part.start) for part in ranges]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
