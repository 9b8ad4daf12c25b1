"""Wears a medium in before it is probed, so that its writes are those of a drive in use and not of a fresh one.

The file takes most of the free space and is written twice from end to end, which uses up the fast region that many
drives have for new writes; then it is rewritten in random order until the rate is steady. Steady as in the SNIA
Performance Test Specification: over five windows in a row the rates lie within 20 % of their mean, and a straight line
through them rises or falls by at most 10 % of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.bench.payload import SECTOR_BYTES
from rewarm.bench.raw import Arena, Extent, make_operations, random_arena, run_raw
from rewarm.bench.stages import Stages
from rewarm.store.devices.base import WRITE
from rewarm.store.devices.select import Choice

PASSES = 2
BLOCK_BYTES = 1 << 20
IN_FLIGHT = 16
WINDOW_S = 10.0
WINDOWS = 5
RANGE_MAX, SLOPE_MAX = 0.2, 0.1
STEADY_S_MAX = 1800.0
"""A drive that is not steady by then is measured as it is, and the result says so."""


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """How a medium was worn in: bytes written, the rate of every window of random writes, and whether it got steady."""

    written_bytes: int
    window_s: float
    windows_bytes_per_s: list[float]
    reached: bool


def precondition(extent: Extent, choice: Choice, seed: int, stages: Stages) -> Steady:
    """Wear the file in. Raises `StorageError` when a write fails."""
    arena = random_arena(IN_FLIGHT * BLOCK_BYTES, seed)
    operations = make_operations([extent], WRITE, BLOCK_BYTES, None)
    written, began = 0, time.monotonic()
    with stages(f"writing the file {PASSES} times", PASSES * extent.size) as progress:
        for _ in range(PASSES):
            for first in range(0, len(operations), 256):
                part = operations[first : first + 256]
                written += _write(choice, part, arena, float("inf"), written)
                progress.advance(len(part) * BLOCK_BYTES)
    rates: list[float] = []
    rate = written / (time.monotonic() - began)
    deadline = time.monotonic() + STEADY_S_MAX
    with stages("rewriting it until the rate is steady", WINDOWS * WINDOW_S * rate) as progress:
        while not is_steady(rates) and time.monotonic() < deadline:
            order = np.random.default_rng([seed, len(rates)]).integers(0, len(operations), 1 << 17)
            start = time.monotonic()
            moved = _write(choice, operations[order], arena, WINDOW_S, written)
            rates.append(moved / (time.monotonic() - start))
            written += moved
            progress.advance(moved)
    return Steady(written_bytes=written, window_s=WINDOW_S, windows_bytes_per_s=rates, reached=is_steady(rates))


def is_steady(rates: Sequence[float]) -> bool:
    """Whether the last five rates are steady, as the module says."""
    if len(rates) < WINDOWS:
        return False
    last = np.array(rates[-WINDOWS:])
    mean = float(last.mean())
    slope = float(np.polyfit(np.arange(WINDOWS), last, 1)[0])
    return float(np.ptp(last)) <= RANGE_MAX * mean and abs(slope) * (WINDOWS - 1) <= SLOPE_MAX * mean


def _write(choice: Choice, operations: npt.NDArray[np.void], arena: Arena, limit_s: float, written: int) -> int:
    """Bytes written; no sector is the same as one before."""
    device = choice.open()
    try:
        first_stamp = written // SECTOR_BYTES
        return run_raw(device, operations, arena, IN_FLIGHT, limit_s, first_stamp=first_stamp).bytes_moved
    finally:
        device.close()
