"""Segments that a local medium could not read: a bad sector, or a device that is away. Which of the two, nobody says.

Their blocks are forgotten, so that a save repairs them, and taken again later, each time twice as late: a device that
comes back brings its blocks back, and a bad sector costs little.
"""

from __future__ import annotations

import math
import time

DOUBLINGS_MAX = 7
"""At last a segment is taken again each 128 I/O deadlines: about an hour."""

Place = tuple[str, int]
"""Writer and number of a segment."""


class Doubts:
    """When to take which segment again; the first time one I/O deadline (seconds) after a read of it has failed."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._due: dict[Place, tuple[int, float]] = {}

    def note(self, place: Place) -> None:
        """A read of this segment has failed. May be called from any thread."""
        times, due_s = self._due.get(place, (0, math.inf))
        if due_s == math.inf:
            wait_s = self._deadline_s * 2 ** min(times, DOUBLINGS_MAX)
            self._due[place] = times + 1, time.monotonic() + wait_s

    def due(self) -> set[Place]:
        """What is to be taken again now, once."""
        now_s = time.monotonic()
        due = {place for place, (_, due_s) in list(self._due.items()) if due_s <= now_s}
        for place in due:
            self._due[place] = self._due[place][0], math.inf
        return due
