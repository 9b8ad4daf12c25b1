"""Where restored bytes go: one region of memory per request, as an engine's cache would give it.

When the prefixes of a whole wave fit into the memory that a run may take, each request restores its prefix with one
`load` and every byte is compared after the wave. When they do not, each request works through its prefix in slices
over two slots: one is filled while the other is checked, and a few bytes of every sector are compared at once.
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


@dataclass(frozen=True)
class Region:
    """How the requests of one wave use the arena: blocks `slices[i]` of a prefix go together into one of `slots`."""

    slices: tuple[range, ...]
    slots: int
    slot_bytes: int

    @property
    def whole(self) -> bool:
        """Whether a whole prefix stays in memory until the wave is over."""
        return len(self.slices) == 1


class Destinations:
    """Memory for waves of up to `concurrency_max` requests of blocks of `lengths`; `budget_bytes` bounds it.

    Raises `ConfigError` when even two blocks per request do not fit.
    """

    def __init__(self, lengths: Sequence[int], concurrency_max: int, budget_bytes: int) -> None:
        self._padded = pad(lengths)
        self._lengths = lengths
        self._budget_bytes = budget_bytes
        largest = self.region(concurrency_max)
        self.arena: Arena = make_arena(largest.slots * largest.slot_bytes * concurrency_max)

    def region(self, concurrency: int) -> Region:
        """How a wave of this size lies in memory."""
        share = self._budget_bytes // concurrency
        if sum(self._padded) <= share:
            return Region((range(len(self._padded)),), 1, sum(self._padded))
        slot = share // 2 // ALIGNMENT * ALIGNMENT
        if slot < max(self._padded):
            raise ConfigError(
                f"a wave of {concurrency} needs {format_size(2 * concurrency * max(self._padded))} of memory for two "
                f"blocks per request, and may take {format_size(self._budget_bytes)}; lower concurrency or block_tokens"
            )
        return Region(tuple(cut(self._padded, slot)), 2, slot)

    def buffers(self, region: Region, request: int, slot: int, blocks: range) -> list[Arena]:
        """Memory for these blocks of one request: aligned, side by side, shape (bytes,) each."""
        at = (request * region.slots + slot) * region.slot_bytes
        found = []
        for block in blocks:
            found.append(self.arena[at : at + self._lengths[block]])
            at += self._padded[block]
        return found

    def poison(self, region: Region, concurrency: int) -> None:
        """Overwrite what a wave will use, so that bytes of an earlier wave cannot pass for those of the next."""
        used = self.arena[: concurrency * region.slots * region.slot_bytes]
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
