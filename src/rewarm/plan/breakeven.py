"""From which length and which bandwidth on is loading faster than computing? One request alone, cold."""

from __future__ import annotations

import math

from rewarm.geometry import break_even_bandwidth, meeting_point
from rewarm.plan.cost import Costs
from rewarm.plan.media import Source, source_of
from rewarm.plan.result import BreakEven
from rewarm.plan.spec import PlanSpec

LENGTH_MAX = 1 << 20
"""Tokens looked at: longer contexts than models have today."""


def break_evens(spec: PlanSpec, costs: Costs, context_tokens: int) -> tuple[BreakEven, ...]:
    """One for every medium of the plan."""
    return tuple(_break_even(costs, source_of(medium, spec), context_tokens) for medium in spec.medium)


def _break_even(costs: Costs, source: Source, context_tokens: int) -> BreakEven:
    load = source.fixed_s + float(costs.bytes_of([context_tokens])[0]) / source.rate
    bandwidth = break_even_bandwidth(
        costs.model, context_tokens, costs.prefill, floor_s=source.fixed_s, kv_dtype=costs.kv_dtype
    )
    both = meeting_point(
        costs.model, context_tokens, source.rate, costs.prefill, floor_s=source.fixed_s, kv_dtype=costs.kv_dtype
    )
    return BreakEven(
        medium=source.medium.name,
        length_tokens=break_even_length(costs, source),
        context_tokens=context_tokens,
        bandwidth_bytes_per_s=None if bandwidth == math.inf else bandwidth,
        medium_bytes_per_s=source.rate,
        load_s=load,
        compute_s=float(costs.prefill_s([context_tokens], [0])[0]),
        both_s=both.seconds,
    )


def break_even_length(costs: Costs, source: Source) -> int | None:
    """The shortest context that loads faster than it computes: computing grows faster than loading, so bisection."""

    def worth(tokens: int) -> bool:
        load = source.fixed_s + float(costs.bytes_of([tokens])[0]) / source.rate
        return load < float(costs.prefill_s([tokens], [0])[0])

    if not worth(LENGTH_MAX):
        return None
    low, high = 0, LENGTH_MAX
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if worth(middle) else (middle, high)
    return high
