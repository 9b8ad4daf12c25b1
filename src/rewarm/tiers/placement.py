"""Where blocks of a save go: runs of about 1 MiB over all drives, each drive in proportion to its measured speed.

Nothing about placement is stored: a block is found by asking every drive's index. So no table can be lost, and drives
may come and go. It promises that equal drives get equal shares to within one run, over many saves as within one.
"""

from __future__ import annotations

from collections.abc import Sequence

RUN_BYTES = 1 << 20
"""Blocks of one run go to one drive: as long as the longest single read, so that spreading costs no extra reads."""

EQUAL_SPEEDS = 1.25
"""Drives whose speeds differ by less are taken to be equal: shares must not follow noise."""


def shares(speeds: Sequence[float | None]) -> list[float]:
    """Share of each drive by its speed in bytes/s, sum 1; one that was not measured counts as the mean."""
    known = [speed for speed in speeds if speed is not None]
    if not known or max(known) < EQUAL_SPEEDS * min(known):
        return [1 / len(speeds)] * len(speeds)
    mean = sum(known) / len(known)
    weights = [mean if speed is None else speed for speed in speeds]
    return [weight / sum(weights) for weight in weights]


class Placement:
    """Chooses a drive, by number, for one block after another. Not thread-safe."""

    def __init__(self) -> None:
        self._clocks: list[float] = []
        self._drive = -1
        self._left_bytes = 0

    def add_drive(self, used_bytes: int) -> None:
        """One more drive; of two that are equal, the emptier one gets the first run."""
        start = int(min(self._clocks, default=0.0))
        self._clocks.append(start + used_bytes / (used_bytes + RUN_BYTES))

    def choose(self, count: int, share: Sequence[float], usable: Sequence[int]) -> int:
        """The drive for a block of `count` bytes, out of `usable`; `share` has an entry for every drive."""
        if self._drive not in usable or self._left_bytes <= 0:
            self._drive = min(usable, key=self._clocks.__getitem__)
            self._left_bytes = RUN_BYTES
            # A drive that was avoided must not make up for it: the others' requests would then use that drive alone.
            now = self._clocks[self._drive]
            self._clocks = [max(clock, now) for clock in self._clocks]
        self._left_bytes -= count
        self._clocks[self._drive] += count / share[self._drive]
        return self._drive
