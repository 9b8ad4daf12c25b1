"""What is kept of a segment that has to go: blocks that this process has read since they were written.

First in, first out with reinsertion: the most read blocks of a victim, up to a quarter of it, are saved anew, as if
they had just been computed, and have to be read again to stay once more. For the evictor, in its thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from rewarm.store.buffers import aligned_region
from rewarm.store.layout import digest, pages
from rewarm.store.segments import Segment
from rewarm.store.tailing import Shared

KEPT_SHARE = 4
"""At most a quarter of a victim is kept, so that an eviction always frees room."""

Save = Callable[[list[bytes], list[Any]], object]


class Kept(msgspec.Struct, frozen=True):
    """Blocks in memory: keys, and their bytes."""

    keys: list[bytes]
    blocks: list[Any]


class Keeper:
    """Reads what is worth keeping, and saves it again."""

    def __init__(self, shared: Shared, save: Save) -> None:
        self._shared = shared
        self._save = save

    def read(self, segment: Segment, budget: int) -> Kept:
        """The most read blocks of a segment, `budget` bytes of it at most; none that cannot be read or is damaged."""
        kept = Kept([], [])
        with self._shared.lock:
            wanted = self._shared.index.most_read(segment.slot) if segment.indexed else []
        if not wanted:
            return kept
        with contextlib.suppress(OSError):
            descriptor = self._shared.files.acquire(segment.path)
            try:
                for key, offset, length, checksum in wanted:
                    if pages(length) > budget:
                        break
                    budget -= pages(length)
                    region = aligned_region(pages(length))
                    self._shared.counters.add(bytes_read=os.preadv(descriptor, [region.data], offset))
                    if digest(region[:length]) == checksum:
                        kept.keys.append(key)
                        kept.blocks.append(region[:length])
            finally:
                self._shared.files.release(segment.path)
        return kept

    def save(self, kept: Kept) -> None:
        """Queue what was kept; over the queue's budget it is lost, as it would have been."""
        if kept.keys:
            self._save(kept.keys, kept.blocks)
