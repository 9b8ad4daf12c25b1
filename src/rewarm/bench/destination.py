"""Where restored bytes go: one region of memory per request, as an engine's cache would give it.

When the prefixes of a whole wave fit into the memory that a run may take, each request restores its prefix with one
`load` and every byte is compared after the wave. When they do not, each request works through its prefix in slices
over two slots: one is filled while the other is checked, and a few bytes of every sector are compared at once.
Requests that are to be served together are cut into slices as well, but each slice has a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rewarm.bench.raw import Arena, make_arena
from rewarm.errors import ConfigError
from rewarm.units import format_size

ALIGNMENT = 4096
"""Blocks start on whole pages in memory, so that a store can read straight into them."""
MEMORY_SHARE = 0.5
"""Most of the available memory that destinations may take: the rest of the machine must go on."""


TOGETHER_SLICES = 32
"""Slices of a request that is served side by side with others: they then end within a thirty-second of their time."""


@dataclass(frozen=True)
class Region:
    """How the requests of one wave use the arena: each has `request_bytes` of it, and loads blocks `slices[i]` at once,
    `slots` of those at any time. `whole`: its prefix stays in memory until the wave is over."""

    slices: tuple[range, ...]
    slots: int
    request_bytes: int
    whole: bool


class Destinations:
    """Memory for waves of up to `concurrency_max` requests of blocks of `lengths`; `budget_bytes` bounds it.

    Raises `ConfigError` when even two blocks per request do not fit.
    """

    def __init__(self, lengths: Sequence[int], concurrency_max: int, budget_bytes: int) -> None:
        self._padded = pad(lengths)
        self._lengths = lengths
        self._budget_bytes = budget_bytes
        largest = self.region(concurrency_max)
        self.arena: Arena = make_arena(largest.request_bytes * concurrency_max)

    def region(self, concurrency: int, *, together: bool = False) -> Region:
        """How a wave of this size lies in memory; `together`: its requests take turns on the medium."""
        share = self._budget_bytes // concurrency
        total = sum(self._padded)
        if total <= share and together:
            slice_bytes = max(max(self._padded), total // TOGETHER_SLICES)
            return Region(tuple(cut(self._padded, slice_bytes)), 2, total, True)
        if total <= share:
            return Region((range(len(self._padded)),), 1, total, True)
        slot = share // 2 // ALIGNMENT * ALIGNMENT
        if slot < max(self._padded):
            raise ConfigError(
                f"a wave of {concurrency} needs {format_size(2 * concurrency * max(self._padded))} of memory for two "
                f"blocks per request, and may take {format_size(self._budget_bytes)}; lower concurrency or block_tokens"
            )
        return Region(tuple(cut(self._padded, slot)), 2, 2 * slot, False)

    def buffers(self, region: Region, request: int, slot: int, blocks: range) -> list[Arena]:
        """Memory for these blocks of one request: aligned, side by side, shape (bytes,) each."""
        inside = sum(self._padded[: blocks.start]) if region.whole else slot * (region.request_bytes // region.slots)
        at = request * region.request_bytes + inside
        found = []
        for block in blocks:
            found.append(self.arena[at : at + self._lengths[block]])
            at += self._padded[block]
        return found

    def poison(self, region: Region, concurrency: int) -> None:
        """Overwrite what a wave will use, so that bytes of an earlier wave cannot pass for those of the next."""
        used = self.arena[: concurrency * region.request_bytes]
        used.view(np.uint64).fill(0xDEAD_DEAD_DEAD_DEAD)


def pad(lengths: Sequence[int]) -> list[int]:
    """Bytes that blocks of these lengths take in memory."""
    return [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]


def cut(padded: Sequence[int], limit: int) -> list[range]:
    """Consecutive runs of blocks of at most `limit` bytes each; pre-condition: no block is larger."""
    runs: list[range] = []
    first = used = 0
    for block, size in enumerate(padded):
        if used + size > limit:
            runs.append(range(first, block))
            first, used = block, 0
        used += size
    return [*runs, range(first, len(padded))]


def available_memory() -> int:
    """Bytes of memory that can be used without swapping, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kibibytes * 1024
