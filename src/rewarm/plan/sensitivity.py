"""Which inputs would change the verdict, and at which value: each is moved alone, up and down, until the kind of the
choice changes. Computed with the same simulator and the same seed, on a sample where the load is a long trace."""

from __future__ import annotations

import math
from collections.abc import Callable

from rewarm.errors import ConfigError
from rewarm.plan.choose import Choice, choose
from rewarm.plan.cost import costs_of
from rewarm.plan.knobs import Knob, knobs_of
from rewarm.plan.load import Load
from rewarm.plan.result import Change
from rewarm.plan.spec import PlanSpec

FACTORS = (1.25, 1.6, 2.0, 3.0, 5.0, 8.0)
"""An input is moved by at most this much either way."""
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Values tried for inputs that are shares."""
_NEARNESS_OF_SHARE = 5.0
"""A change of a share by 0.2 counts as much as a change of another input by a factor of e."""
_HALVINGS = 5
"""After the first value that changes the verdict: precise to about one per cent of the input."""
CHANGES = 3


def changes_of(
    spec: PlanSpec, load: Load, base: Choice, daily_writes: dict[str, float],
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[Change, ...]:  # fmt: skip
    """The inputs nearest to changing the kind of the choice, nearest first."""
    found: list[tuple[float, Change]] = []
    for knob in knobs_of(spec):
        progress(knob.name)
        turn = _nearest_turn(knob, load, base, daily_writes)
        if turn is not None:
            found.append(turn)
    found.sort(key=lambda row: row[0])
    return tuple(change for _, change in found[:CHANGES])


def _nearest_turn(knob: Knob, load: Load, base: Choice, daily_writes: dict[str, float]) -> tuple[float, Change] | None:
    def other(value: float) -> Choice | None:
        """The choice at another value, if it is of another kind. A value that cannot be changes nothing."""
        try:
            changed = knob.put(value)
            costs = costs_of(changed, load.costs.model, load.context_tokens)
        except ConfigError:
            return None
        choice = choose(changed, costs, load.under(changed, costs), daily_writes)
        return choice if choice.candidate.kind != base.candidate.kind else None

    turns = []
    for ladder in _ladders(knob):
        last = knob.value
        for value in ladder:
            choice = other(value)
            if choice is not None:
                turns.append(_bisect(knob, last, value, choice, other))
                break
            last = value
    turns = sorted(turns, key=lambda row: row[0])
    return turns[0] if turns else None


def _ladders(knob: Knob) -> tuple[list[float], list[float]]:
    if knob.shares:
        return [s for s in SHARES if s > knob.value], [s for s in (*reversed(SHARES), 0.0) if s < knob.value]
    return [knob.value * f for f in FACTORS], [knob.value / f for f in FACTORS]


def _bisect(
    knob: Knob, keeps: float, turns: float, choice: Choice, other: Callable[[float], Choice | None]
) -> tuple[float, Change]:
    for _ in range(_HALVINGS):
        middle = (keeps + turns) / 2 if knob.shares or keeps == 0 else math.sqrt(keeps * turns)
        found = other(middle)
        if found is None:
            keeps = middle
        else:
            turns, choice = middle, found
    distance = abs(turns - knob.value) * _NEARNESS_OF_SHARE if knob.shares else abs(math.log(turns / knob.value))
    side = "above" if turns > knob.value else "below"
    text = f"{knob.name} {side} {knob.show(turns)} (now {knob.show(knob.value)}): {choice.candidate.kind}"
    change = Change(input=knob.name, value=knob.value, turns_at=turns, verdict=choice.candidate.kind, text=text)
    return distance, change
