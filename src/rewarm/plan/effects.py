"""How every candidate's figures move with every input: each input a little larger, alone, with the same seed."""

from __future__ import annotations

from rewarm.errors import ConfigError
from rewarm.plan.assess import Assessment, assess
from rewarm.plan.choose import heaviest
from rewarm.plan.cost import costs_of
from rewarm.plan.knobs import Knob, knobs_of
from rewarm.plan.load import Load
from rewarm.plan.media import candidates_of
from rewarm.plan.money import usd_per_million_tokens
from rewarm.plan.result import Effect
from rewarm.plan.spec import PlanSpec

STEP = 0.1
"""Relative for an input, absolute for a share."""
_NOTHING = 0.001
"""Effects below a tenth of a per cent are left out."""


def effects_of(spec: PlanSpec, load: Load) -> tuple[Effect, ...]:
    """Effects of all inputs on all candidates that are not nothing, largest on the time to first token first."""
    base = {one.candidate.name: one for one in _all(spec, load)}
    found = []
    for knob in knobs_of(spec):
        changed = _changed(knob)
        if changed is None:
            continue
        for one in _all(changed, load):
            effect = _effect(spec, changed, knob, base[one.candidate.name], one)
            if max(abs(effect.ttft_p90), abs(effect.saturation_requests_per_s), abs(effect.usd_per_million_tokens)) > (
                _NOTHING
            ):
                found.append(effect)
    order = list(base)
    return tuple(sorted(found, key=lambda row: (order.index(row.medium), -abs(row.ttft_p90))))


def _changed(knob: Knob) -> PlanSpec | None:
    """The plan with the input a little larger; a share that is 1 already is made smaller by none."""
    value = min(knob.value + STEP, 1.0) if knob.shares else knob.value * (1 + STEP)
    if value == knob.value or knob.name.startswith("objective."):
        return None
    try:
        return knob.put(value)
    except ConfigError:
        return None


def _all(spec: PlanSpec, load: Load) -> list[Assessment]:
    costs = costs_of(spec, load.costs.model, load.context_tokens)
    here = load.under(spec, costs)
    return [assess(spec, costs, here, candidate, heaviest(here)) for candidate in candidates_of(spec)]


def _effect(spec: PlanSpec, changed: PlanSpec, knob: Knob, before: Assessment, after: Assessment) -> Effect:
    costs = [
        usd_per_million_tokens(plan, one, one.cell.requests_per_s) for plan, one in ((spec, before), (changed, after))
    ]
    return Effect(
        medium=before.candidate.name,
        input=knob.name,
        ttft_p90=after.cell.ttft_s.p90 / before.cell.ttft_s.p90 - 1,
        output_tokens_per_s=after.cell.output_tokens_per_s / before.cell.output_tokens_per_s - 1,
        saturation_requests_per_s=after.saturation.requests_per_s / before.saturation.requests_per_s - 1,
        usd_per_million_tokens=costs[1] / costs[0] - 1 if costs[0] else 0.0,
    )
