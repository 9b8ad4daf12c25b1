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
    compute = float(costs.prefill_s([context_tokens], [0])[0])
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
        compute_s=compute,
        both_s=both.seconds,
        reason=_reason(source, context_tokens, load, compute),
    )


def _reason(source: Source, context_tokens: int, load_s: float, compute_s: float) -> str:
    faster = f"loading is {compute_s / load_s:.1f} times faster" if load_s < compute_s else "computing is faster"
    fixed = f"{source.fixed_s:.3g} s fixed and " if source.fixed_s else ""
    return f"{context_tokens:,} tokens: {fixed}{load_s - source.fixed_s:.3g} s at {source.limit}; {faster}"


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
