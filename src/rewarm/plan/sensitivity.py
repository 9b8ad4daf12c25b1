"""Which inputs would change the verdict, and at which value: each is moved alone, up and down, until the kind of the
choice changes. Computed with the same simulator and the same seed, on a sample where the load is a long trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rewarm.errors import ConfigError
from rewarm.plan.choose import Choice, choose
from rewarm.plan.cost import costs_of
from rewarm.plan.knobs import Knob, knobs_of
from rewarm.plan.load import Load
from rewarm.plan.result import Change
from rewarm.plan.spec import PlanSpec

FACTORS = (1.25, 1.6, 2.0, 3.0, 5.0, 8.0)
"""An input is moved by these factors, up and down, all inputs by one before any by the next: far ones are spared once
the nearest changes are known."""
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
"""The same for inputs that are shares: moved by so much, within 0 and 1."""
_NEARNESS_OF_SHARE = 5.0
"""A change of a share by 0.2 counts as much as a change of another input by a factor of e."""
_HALVINGS = 4
"""After the first value that changes the verdict: precise to a few per cent of the last step."""
CHANGES = 3


@dataclass
class _Way:
    """One input in one direction: the last value that left the verdict as it is, and the values still to try."""

    knob: Knob
    keeps: float
    values: list[float]


def changes_of(
    load: Load,
    spec: PlanSpec,
    base: Choice,
    daily_writes: dict[str, float],
    progress: Callable[[str], None] = lambda name: None,
) -> tuple[Change, ...]:
    """The inputs nearest to changing the kind of the choice, nearest first; each input once."""
    ways = [_Way(knob, knob.value, values) for knob in knobs_of(spec) for values in _values(knob)]
    found: dict[str, tuple[float, Change]] = {}
    for step in range(len(FACTORS)):
        for way in ways:
            if step >= len(way.values) or _distance(way.knob, way.keeps) >= _cutoff(found):
                continue
            progress(f"{way.knob.name} at {way.knob.show(way.values[step])}")
            choice = _other(way.knob, way.values[step], load, base, daily_writes)
            if choice is None:
                way.keeps = way.values[step]
                continue
            turn = _bisect(way, way.values[step], choice, load, base, daily_writes)
            found[way.knob.name] = min(turn, found.get(way.knob.name, turn), key=lambda row: row[0])
            way.keeps = math.inf
    nearest = sorted(found.values(), key=lambda row: row[0])
    return tuple(change for _, change in nearest[:CHANGES])


def tries_max(spec: PlanSpec) -> int:
    """The most times that `changes_of` reports progress."""
    return sum(len(values) for knob in knobs_of(spec) for values in _values(knob))


def _distance(knob: Knob, value: float) -> float:
    """How far a value is from today's: its factor's logarithm, or the same for a share."""
    if math.isinf(value):
        return math.inf
    return abs(value - knob.value) * _NEARNESS_OF_SHARE if knob.shares else abs(math.log(value / knob.value))


def _cutoff(found: dict[str, tuple[float, Change]]) -> float:
    """Beyond this distance nothing can be among the nearest changes any more."""
    return sorted(row[0] for row in found.values())[CHANGES - 1] if len(found) >= CHANGES else math.inf


def _values(knob: Knob) -> tuple[list[float], list[float]]:
    if not knob.shares:
        return [knob.value * factor for factor in FACTORS], [knob.value / factor for factor in FACTORS]
    up = [min(knob.value + step, 1.0) for step in SHARES] if knob.value < 1 else []
    return up, [max(knob.value - step, 0.0) for step in SHARES] if knob.value > 0 else []


def _other(knob: Knob, value: float, load: Load, base: Choice, daily_writes: dict[str, float]) -> Choice | None:
    """The choice at another value, if it is of another kind. A value that cannot be changes nothing."""
    try:
        changed = knob.put(value)
        costs = costs_of(changed, load.costs.model, load.context_tokens)
    except ConfigError:
        return None
    choice = choose(changed, costs, load.under(changed, costs), daily_writes)
    return choice if choice.candidate.kind != base.candidate.kind else None


def _bisect(
    way: _Way, turns: float, choice: Choice, load: Load, base: Choice, daily_writes: dict[str, float]
) -> tuple[float, Change]:
    """Narrow down where the verdict turns; gives the distance from today's value and the change."""
    knob, keeps = way.knob, way.keeps
    for _ in range(_HALVINGS):
        middle = (keeps + turns) / 2 if knob.shares else math.sqrt(keeps * turns)
        found = _other(knob, middle, load, base, daily_writes)
        if found is None:
            keeps = middle
        else:
            turns, choice = middle, found
    side = "at" if knob.shares and turns in (0.0, 1.0) else "above" if turns > knob.value else "below"
    text = f"{knob.name} {side} {knob.show(turns)} (now {knob.show(knob.value)}): {choice.candidate.kind}"
    change = Change(input=knob.name, value=knob.value, turns_at=turns, verdict=choice.candidate.kind, text=text)
    return _distance(knob, turns), change
