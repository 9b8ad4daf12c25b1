"""Raw reads and writes of a medium: one loop that keeps a number of bytes in flight, and what came of it.

This is the medium without a store: no index, no checksum, no copy. `probe` and the ceiling of a benchmark both use it.
Time runs from the first submission to the last completion and every byte of that time is counted, so nothing that
comes after a deadline is divided by the time before it. A short or failed operation raises: a ceiling measured on
failing reads would flatter everything that is compared with it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.bench.counters import take_snapshot
from rewarm.bench.payload import SECTOR_BYTES
from rewarm.errors import StorageError
from rewarm.store.devices.base import OPERATION, READ, WRITE, Device

REAP_TIMEOUT_S = 60.0
"""A medium that completes nothing for so long has failed."""

_FAULT_BYTES = 64 << 20

Arena = npt.NDArray[np.uint8]


class Extent(msgspec.Struct, frozen=True):
    """A file to read or write, opened, and how many of its bytes to use, from where on."""

    descriptor: int
    size: int
    start: int = 0


class RawReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one run moved; latencies are seconds from submission to completion as this process saw it."""

    bytes_moved: int
    operations: int
    read_bytes: int
    """Of `bytes_moved`; the rest was written."""
    seconds: float
    cpu_s: float
    latencies_s: npt.NDArray[np.float64]

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the whole run over its whole time."""
        return self.bytes_moved / self.seconds


def make_arena(size: int) -> Arena:
    """Page-aligned memory of `size` bytes, already backed by pages, so that no measured read pays for page faults."""
    region = mmap.mmap(-1, size)
    region.madvise(mmap.MADV_HUGEPAGE)
    arena = np.frombuffer(region, dtype=np.uint8)
    for first in range(0, size, _FAULT_BYTES):  # in parts, so that Ctrl-C is heard between them
        arena[first : first + _FAULT_BYTES : mmap.PAGESIZE] = 0
    return arena


def random_arena(size: int, seed: int) -> Arena:
    """Memory of incompressible bytes, to write from."""
    arena = make_arena(size)
    arena.view(np.uint64)[:] = np.random.default_rng(seed).integers(0, 2**64, size // 8, dtype=np.uint64)
    return arena


def make_operations(
    extents: Sequence[Extent], opcode: int, block_bytes: int, order: np.random.Generator | None
) -> npt.NDArray[np.void]:
    """One operation per whole block of the extents, in file order or shuffled; addresses are set when they start."""
    counts = [extent.size // block_bytes for extent in extents]
    operations = np.zeros(sum(counts), OPERATION)
    operations["opcode"] = opcode
    operations["length"] = block_bytes
    operations["fd"] = np.repeat([extent.descriptor for extent in extents], counts)
    operations["offset"] = np.concatenate(
        [extent.start + np.arange(count) * block_bytes for extent, count in zip(extents, counts, strict=True)]
    )
    return operations if order is None else operations[order.permutation(len(operations))]


def run_raw(
    device: Device,
    operations: npt.NDArray[np.void],
    arena: Arena,
    in_flight: int,
    limit_s: float,
    *,
    first_stamp: int = 0,
) -> RawReading:
    """Keep `in_flight` operations going, round and round through `operations`, until one pass or `limit_s` is over.

    Pre-condition: equal lengths of whole sectors, and an arena of `in_flight` of them; what is written comes from it,
    with a number in every sector that counts up from `first_stamp`. Raises `StorageError` when one fails.
    """
    length = int(operations["length"][0])
    slots = min(in_flight, device.depth, len(operations))
    writing = bool((operations["opcode"] == WRITE).any())
    base = int(arena.__array_interface__["data"][0])
    free = list(range(slots))
    stamps = arena[: slots * length].view(np.uint64).reshape(slots, -1)[:, :: SECTOR_BYTES // 8]
    started_at = np.zeros(slots)
    latencies: list[npt.NDArray[np.float64]] = []
    submitted = 0
    before = take_snapshot()
    start = last = time.monotonic()
    try:
        while (submitted < len(operations) and last - start < limit_s) or len(free) < slots:
            room = min(len(free), len(operations) - submitted) if last - start < limit_s else 0
            if room:
                batch = operations[submitted : submitted + room].copy()
                taken, free = free[:room], free[room:]
                batch["tag"] = taken
                batch["address"] = base + np.array(taken, dtype=np.uint64) * length
                if writing:
                    # Every sector written is another one: an array that deduplicates must store them all.
                    each = stamps.shape[1]
                    stamps[taken] = first_stamp + submitted * each + np.arange(room * each).reshape(room, each)
                started_at[taken] = time.monotonic()
                device.submit(batch)
                submitted += room
            done = device.reap(1, REAP_TIMEOUT_S)
            last = time.monotonic()
            _check(done["result"], length, operations)
            tags = done["tag"].astype(np.int64)
            latencies.append(last - started_at[tags])
            free += tags.tolist()
    finally:
        _drain(device)
    cpu_s = take_snapshot().since(before).cpu_s
    return RawReading(
        bytes_moved=submitted * length,
        operations=submitted,
        read_bytes=int((operations["opcode"][:submitted] == READ).sum()) * length,
        seconds=last - start,
        cpu_s=cpu_s,
        latencies_s=np.concatenate(latencies),
    )


def _drain(device: Device) -> None:
    """Wait for what is in flight: its memory must not be freed under the kernel, whatever ended the run."""
    while device.in_flight() and len(device.reap(1, REAP_TIMEOUT_S)):
        pass


def _check(results: npt.NDArray[np.int64], length: int, operations: npt.NDArray[np.void]) -> None:
    verb = "read" if operations["opcode"][0] == READ else "write"
    if not len(results):
        raise StorageError(f"the medium completed no {verb} for {REAP_TIMEOUT_S:.0f} s")
    wrong = results[results != length]
    if len(wrong):
        code = int(wrong[0])
        reason = os.strerror(-code) if code < 0 else f"only {code} of {length} bytes"
        raise StorageError(f"a raw {verb} of {length} bytes failed: {reason}")
