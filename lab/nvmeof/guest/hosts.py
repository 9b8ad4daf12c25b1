"""What one of two hosts does with what they share: saves its own blocks without end, and loads those of the other.

Only blocks that a reader may count on are counted: known for two polls at least, and not announced evicted. Besides,
blocks whose eviction was announced are asked for again, because what was written in their place must never be taken
for them.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

STEP = 4
AHEAD = 16 * STEP
"""How far beyond the newest block known a look-up goes."""
OLD_COUNT, ANY_COUNT, GONE_COUNT = 4, 4, 2
"""Loaded in one turn: the oldest, which are evicted next; any; some that are gone."""
GONE_KEPT = 64
REFUSED_PAUSE_S = 0.1
ASKED_MIN = 100
"""Fewer loads would show nothing: an emulator may need longer for them than it was given."""

LATE_S = 120.0


class Host(Protocol):
    """A worker with an open pool."""

    def known(self, numbers: list[int]) -> list[int]:
        """Those of these blocks that a look-up knows."""

    def save(self, first: int, count: int) -> dict[str, Any]:
        """Save blocks; `stored` are the published ones."""

    def load_each(self, numbers: list[int]) -> dict[str, Any]:
        """Load blocks; `hits`, `wrong` and `outcomes` are counts."""


@dataclass
class Seen:
    """What a host knows of the other's blocks."""

    next_number: int
    known_s: dict[int, float] = field(default_factory=dict)
    """When each was seen first."""
    gone: list[int] = field(default_factory=list)
    announced: int = 0

    def look(self, host: Host) -> None:
        """Take in what has been published since, and what has been announced evicted."""
        ahead = list(range(self.next_number, self.next_number + AHEAD))
        now_s = time.monotonic()
        for number in host.known([*self.known_s, *ahead]):
            self.known_s.setdefault(number, now_s)
        still = set(host.known(list(self.known_s)))
        gone = [number for number in self.known_s if number not in still]
        for number in gone:
            del self.known_s[number]
        self.announced += len(gone)
        self.gone = (self.gone + gone)[-GONE_KEPT:]
        self.next_number = max([self.next_number, *(number + 1 for number in self.known_s)])

    def choose(self, chance: random.Random, visible_s: float) -> list[int]:
        """Blocks that have been known for so long: the oldest, and any."""
        due = [number for number, since_s in self.known_s.items() if time.monotonic() - since_s >= visible_s]
        oldest, rest = due[:OLD_COUNT], due[OLD_COUNT:]
        return oldest + chance.sample(rest, min(ANY_COUNT, len(rest)))


def share(host: Host, mine: int, theirs: int, seconds: float, visible_s: float) -> dict[str, Any]:
    """Save from block `mine` on, load from block `theirs` on, for so many seconds; what was counted."""
    chance = random.Random(mine)
    seen = Seen(theirs)
    count = dict.fromkeys(("saved", "refused", "asked", "hits", "wrong", "stale"), 0)
    causes: dict[str, int] = {}
    end_s = time.monotonic() + seconds
    next_mine = mine
    late_s = end_s + LATE_S
    while (now_s := time.monotonic()) < end_s or (
        now_s < late_s and (count["asked"] < ASKED_MIN or not seen.announced)
    ):
        stored = host.save(next_mine, STEP)["stored"]
        count["saved"] += len(stored)
        count["refused"] += STEP - len(stored)
        next_mine += STEP
        if not stored:
            time.sleep(REFUSED_PAUSE_S)
        seen.look(host)
        wanted = seen.choose(chance, visible_s)
        if wanted:
            found = host.load_each(wanted)
            count["asked"] += len(wanted)
            count["hits"] += found["hits"]
            count["wrong"] += found["wrong"]
            for cause, times in found["outcomes"].items():
                causes[cause] = causes.get(cause, 0) + times
        if seen.gone:
            found = host.load_each(chance.sample(seen.gone, min(GONE_COUNT, len(seen.gone))))
            count["stale"] += found["hits"]
            count["wrong"] += found["wrong"]
    return {**count, "announced": seen.announced, "causes": causes}
