"""Exact LRU stack distances of a stream of blocks, in chunks, with numpy.

The stack distance of a reference is the number of distinct other blocks touched since the same block was touched last.
An LRU cache of `c` blocks holds the block at that moment if, and only if, the distance is below `c`: one pass answers
for every capacity at once (Mattson, Gecsei, Slutz, Traiger: Evaluation techniques for storage hierarchies, 1970).

With `p` the place of the previous touch and `i` that of this one, the distance is `i - p - 1` less the touches between
them that are themselves repeats of something touched after `p`: the pairs `q < i` with `previous(q) > p`. Those are
the inversions of the sequence of previous places, counted here for all references of a chunk at once. Blocks from
earlier chunks are carried as one touch each, in the order of their last touch, so memory follows the distinct blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST = np.iinfo(np.int64).max
"""The distance of a first touch: larger than any capacity."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """For every reference of a chunk: `distance` in blocks (`FIRST` for a first touch), and `interval_s` since the
    last touch of the same block (NaN for a first touch)."""

    distance: NDArray[np.int64]
    interval_s: NDArray[np.float64]


class StackDistances:
    """Distances of a stream that arrives in chunks. Cost per chunk: sorting it, and the distinct blocks seen so far."""

    def __init__(self) -> None:
        self._ids: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._last: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._last_s: NDArray[np.float64] = np.empty(0, dtype=np.float64)
        self._clock = 0

    @property
    def distinct(self) -> int:
        """Distinct blocks seen so far."""
        return len(self._ids)

    def push(self, blocks: NDArray[np.uint64], touched_s: NDArray[np.float64]) -> Reuse:
        """Take the next chunk: block ids and the time of each touch, both of one length, in order."""
        count = len(blocks)
        if count == 0:
            return Reuse(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64))
        unique, inverse = np.unique(blocks, return_inverse=True)
        slot = np.searchsorted(self._ids, unique)
        known = np.zeros(len(unique), dtype=bool)
        inside = slot < len(self._ids)
        known[inside] = self._ids[slot[inside]] == unique[inside]
        order = np.argsort(inverse, kind="stable")
        previous, interval_s, last_touch = self._previous(inverse, order, slot, known, touched_s)
        distance = np.full(count, FIRST, dtype=np.int64)
        again = np.flatnonzero(previous >= 0)
        places = previous[again]
        distance[again] = self.distinct + again - places - 1 - count_larger_before(places)
        self._remember(unique, slot, known, last_touch, touched_s)
        return Reuse(distance, interval_s)

    def _previous(
        self,
        inverse: NDArray[np.int64],
        order: NDArray[np.int64],
        slot: NDArray[np.int64],
        known: NDArray[np.bool_],
        touched_s: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Place of the previous touch of each reference (-1: none), the time since it, and each block's last touch.

        Places 0 to `distinct - 1` are the blocks of earlier chunks by their last touch; then the chunk follows.
        """
        count = len(inverse)
        previous = np.full(count, -1, dtype=np.int64)
        interval_s = np.full(count, np.nan)
        sorted_blocks = inverse[order]
        same = sorted_blocks[1:] == sorted_blocks[:-1]
        later, earlier = order[1:][same], order[:-1][same]
        previous[later] = earlier + self.distinct
        interval_s[later] = touched_s[later] - touched_s[earlier]
        first = order[np.concatenate([[True], ~same])]
        old, old_slot = first[known], slot[known]
        previous[old] = np.searchsorted(np.sort(self._last), self._last[old_slot])
        interval_s[old] = touched_s[old] - self._last_s[old_slot]
        return previous, interval_s, order[np.concatenate([~same, [True]])]

    def _remember(
        self,
        unique: NDArray[np.uint64],
        slot: NDArray[np.int64],
        known: NDArray[np.bool_],
        last_touch: NDArray[np.int64],
        touched_s: NDArray[np.float64],
    ) -> None:
        self._last[slot[known]] = self._clock + last_touch[known]
        self._last_s[slot[known]] = touched_s[last_touch[known]]
        fresh, at = ~known, slot[~known]
        self._ids = np.insert(self._ids, at, unique[fresh])
        self._last = np.insert(self._last, at, self._clock + last_touch[fresh])
        self._last_s = np.insert(self._last_s, at, touched_s[last_touch[fresh]])
        self._clock += len(touched_s)


def count_larger_before(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every element the number of larger elements before it. Values must be distinct.

    One pass per bit of the rank, from the highest: among elements that agree in all higher bits, kept in their
    original order, an element with bit 0 counts the elements with bit 1 before it; then each group is split by the
    bit. O(n log n) with a dozen vector operations per bit.
    """
    count = len(values)
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(values, kind="stable")] = np.arange(count, dtype=np.int64)
    moved, larger = rank.copy(), np.zeros(count, dtype=np.int64)
    place = np.arange(count, dtype=np.int64)
    for bit in range(max(count - 1, 0).bit_length() - 1, -1, -1):
        ones = (moved >> bit) & 1
        before = np.cumsum(ones) - ones
        start = (moved >> (bit + 1)) << (bit + 1)
        ones_before = before - before[start]
        zero = ones == 0
        larger[zero] += ones_before[zero]
        target = np.where(zero, place - ones_before, start + (1 << bit) + ones_before)
        split = np.empty_like(moved)
        split[target] = moved
        moved = split
        carried = np.empty_like(larger)
        carried[target] = larger
        larger = carried
    return larger[rank]
