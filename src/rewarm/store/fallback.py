"""What to do about a copy that could not be read: which one to read next, and what is to be said of it in the log.

A copy that is damaged, cut off or unreadable is forgotten by this handle, so that the next save repairs it. Only wrong
bytes in a sealed segment are named in the log, so that they do not come back with a restart: a mount in trouble can
claim anything else. A file that is not there is looked for again with the next pass over its writer's log, and so is
what a network mount could not read. What a local medium could not read is taken again later and later: a save may
repair it meanwhile, and a device that was away comes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from rewarm.store.index import NO_ROW, Places
from rewarm.store.requests import Failure
from rewarm.store.segments import Segment
from rewarm.store.tailing import Shared, Tailer, drop_places, forget_segments


class Fallback:
    """Used by the read loop's thread; `damaged` is called there when something new is to be said in the log."""

    def __init__(self, shared: Shared, tailer: Tailer, damaged: Callable[[], None], *, network: bool) -> None:
        self._shared = shared
        self._tailer = tailer
        self._damaged = damaged
        self._network = network
        self._damage: list[tuple[Segment, int]] = []

    def next_place(self, key: bytes, slot: int, offset: int, failure: Failure, attempt: int) -> Places | None:
        """Where to read a block after its `attempt`-th failure, at this place; None where there is no copy left."""
        segment = self._shared.segments[slot]
        if failure is Failure.GONE:
            forget_segments(self._shared, [segment])
            self._tailer.suspect(segment)
            return self._first(key)
        if failure is Failure.MEDIUM:
            return self._other(key, slot, offset)
        if attempt == 1 and self._may_be_better(failure, segment):
            return self._first(key)
        with self._shared.lock:
            self._shared.index.remove_copy(key, slot, offset)
            named = failure is Failure.MISMATCH and segment.sealed_bytes is not None
            if named:
                segment.dropped |= {offset}
                self._damage.append((segment, offset))
        if named:
            self._damaged()
        elif self._network:  # The mount may be in trouble, and the copy good: what the log says of it is taken again.
            self._shared.files.forget(segment.path)
            self._tailer.suspect(segment)
        elif failure is Failure.UNREADABLE:
            self._shared.files.forget(segment.path)
            self._tailer.doubts.note((segment.writer, segment.number))
        return self._first(key)

    def _may_be_better(self, failure: Failure, segment: Segment) -> bool:
        """True where the same place deserves a second try: a read that failed, or what somebody else still writes."""
        if failure is Failure.UNREADABLE:
            self._shared.files.forget(segment.path)  # Opened anew: the file may be one of a mount that has died since.
            return True
        if segment.sealed_bytes is not None or segment.writer in self._tailer.own_writers:
            return False
        with contextlib.suppress(OSError):
            self._tailer.refresh()
        return True

    def note(self, damage: Sequence[tuple[Segment, int]]) -> None:
        """Forget what lies at these places, and have it named in the log."""
        with self._shared.lock:
            drop_places(self._shared, damage)
            self._damage += damage

    def pending(self) -> bool:
        """True while there is damage that the log does not name yet."""
        return bool(self._damage)

    def take(self) -> list[tuple[Segment, int]]:
        """Damage that is to be named in the log, once."""
        with self._shared.lock:
            damage, self._damage = self._damage, []
        return damage

    def _first(self, key: bytes) -> Places | None:
        with self._shared.lock:
            places = self._shared.index.places([key])
        return None if places.row[0] == NO_ROW else places

    def _other(self, key: bytes, slot: int, offset: int) -> Places | None:
        index = self._shared.index
        with self._shared.lock:
            places = index.places([key])
            row = int(places.row[0])
            if row != NO_ROW and (places.segment[0], places.offset[0]) == (slot, offset):
                row = index.second(key, row)
            return None if row == NO_ROW else index.places_of(np.array([row]))
