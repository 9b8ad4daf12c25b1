"""Compaction: what a new log of a long-lived writer begins with, so that its log stays bounded.

A snapshot names every block of the writer that can be restored, which of its segments are sealed, and the damage that
it has named. What it said of evicted segments is left out: their files are gone, and the old log stays long enough for
everybody who polls.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.store.layout import entry_dtype
from rewarm.store.segments import Segment
from rewarm.store.tailing import Shared


class Snapshot(msgspec.Struct, frozen=True):
    """Entries by key length, (number, bytes) of sealed segments, damaged places."""

    entries: list[tuple[int, npt.NDArray[np.void]]]
    sealed: list[tuple[int, int]]
    damage: list[tuple[Segment, int]]


def take_snapshot(shared: Shared, writer: str, damage: list[tuple[Segment, int]]) -> Snapshot:
    """What a writer's log has to say now."""
    with shared.lock:
        segments = shared.segments.of_writer(writer)
        numbers = {segment.slot: segment.number for segment in segments if segment.indexed}
        keys, slots, places = shared.index.entries_of(list(numbers))
        sealed = [(one.number, one.sealed_bytes) for one in segments if one.sealed_bytes is not None]
    lengths = np.array([len(key) for key in keys], np.int64)
    entries = []
    for key_bytes in np.unique(lengths).tolist():
        rows = np.flatnonzero(lengths == key_bytes)
        batch = np.zeros(len(rows), entry_dtype(key_bytes))
        batch["key"] = np.frombuffer(b"".join(keys[row] for row in rows.tolist()), f"V{key_bytes}")
        batch["segment"] = [numbers[slot] for slot in slots[rows].tolist()]
        batch["offset"], batch["length"] = places.offset[rows], places.length[rows]
        batch["checksum"] = np.frombuffer(b"".join(places.checksum[row] for row in rows.tolist()), "V16")
        entries.append((key_bytes, batch))
    return Snapshot(entries, sealed, [(segment, at) for segment, at in damage if not segment.gone])
