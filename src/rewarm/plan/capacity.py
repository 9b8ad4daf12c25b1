"""How much cache a hit rate takes, and what the saves do to the drives. From the trace of one node."""

from __future__ import annotations

import numpy as np

from rewarm.plan.cost import Costs
from rewarm.plan.placement import admitted_touches, distances, route, tier_tokens
from rewarm.plan.result import Capacity, Writes
from rewarm.plan.spec import Fleet, Medium, PlanSpec
from rewarm.plan.traceload import TraceData
from rewarm.workload import HitCurveBuilder
from rewarm.workload.hitcurve import NEVER

SHARES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Of what an infinite cache hits."""
RATED_YEARS = 5.0
"""Drive writes per day are rated over five years of warranty."""
DAY_S = 86_400.0


def capacities(costs: Costs, data: TraceData) -> tuple[Capacity, ...]:
    """Cache sizes for shares of the possible hit rate."""
    builder = HitCurveBuilder(data.block_tokens)
    builder.add(data.requests)
    curve = builder.finish()
    possible = curve.token_hit_rate()
    found = []
    for share in SHARES:
        tokens = curve.capacity_tokens(share * possible)
        if tokens is not None and possible > 0:
            size = float(tokens) * costs.bytes_per_token
            found.append(
                Capacity(
                    token_hit_rate=share * possible, cached_tokens=tokens, cached_bytes=size, share_of_possible=share
                )
            )
    return tuple(found)


def admissions(spec: PlanSpec) -> tuple[str, ...]:
    """The rules compared: everything, second sight, and the plan's own."""
    return tuple(dict.fromkeys(("all", "second-sight", spec.fleet.admission)))


def writes_of(spec: PlanSpec, costs: Costs, data: TraceData | None) -> tuple[Writes, ...]:
    """Writes of every medium under every rule; without a trace only the plan's rate under its own rule."""
    if data is None:
        rate = spec.workload.saved_tokens_per_s
        if rate is None:
            return ()
        daily = rate * costs.bytes_per_token * DAY_S
        return tuple(_writes(spec, medium, spec.fleet.admission, daily, None, 1.0) for medium in spec.medium)
    found = []
    for medium in spec.medium:
        everything = 0.0
        for admission in admissions(spec):
            daily, rate = _from_trace(spec, costs, data, medium, admission)
            everything = daily if admission == "all" else everything
            found.append(_writes(spec, medium, admission, daily, rate, daily / everything if everything else 1.0))
    return tuple(found)


def _from_trace(spec: PlanSpec, costs: Costs, data: TraceData, medium: Medium, admission: str) -> tuple[float, float]:
    """Bytes per day of the whole fleet, and the token hit rate, with one medium alone. A touch that the rule lets
    through and that is not on the medium is a write."""
    routed = route(data.requests, data.block_tokens, Fleet(), False, spec.seed)
    found = distances(routed, admission, shared=False)
    per_token = max(costs.bytes_per_token, 1)
    capacity = (medium.capacity or np.inf) * medium.drives * _share(spec, medium) / per_token
    tokens = tier_tokens(routed, found, dram_tokens=0.0, sources=((False, capacity),), admission=admission)
    missing = admitted_touches(routed.requests, admission) & (found.local >= min(capacity / data.block_tokens, NEVER))
    missed = float(routed.requests.block_tokens_of(data.block_tokens)[missing].sum())
    duration = max(float(data.requests.arrival_s[-1] - data.requests.arrival_s[0]), 1e-9)
    copies = spec.fleet.nodes if spec.workload.trace_per_node else 1
    daily = missed * per_token / duration * DAY_S * copies
    return daily, float(tokens.sum() / routed.requests.input_tokens.sum())


def _share(spec: PlanSpec, medium: Medium) -> float:
    """Drives of this medium that one copy of the trace has, over those of the plan's entry."""
    if spec.workload.trace_per_node:
        return 1 / spec.fleet.nodes if medium.shared else 1.0
    return 1.0 if medium.shared else float(spec.fleet.nodes)


def _writes(
    spec: PlanSpec, medium: Medium, admission: str, daily: float, hit_rate: float | None, written_share: float
) -> Writes:
    needed = drive_writes_per_day(spec, medium, daily)
    drives = _drives(spec, medium)
    return Writes(
        medium=medium.name,
        admission=admission,
        bytes_per_day=daily,
        drive_writes_per_day=needed,
        rated_drive_writes_per_day=medium.dwpd,
        years=RATED_YEARS * medium.dwpd / needed if needed and medium.dwpd else None,
        write_rate_share=None if medium.drive_write is None else daily / DAY_S / (drives * medium.drive_write),
        token_hit_rate=hit_rate,
        written_share=written_share,
        reason=_reason(spec, admission, daily, hit_rate, needed),
    )


def _reason(spec: PlanSpec, admission: str, daily: float, hit_rate: float | None, needed: float | None) -> str:
    parts = [f"{daily / DAY_S / 1e9:.3g} GB/s of new blocks let in by {admission!r}, as if every hour were like this"]
    if hit_rate is not None:
        parts.append(f"{hit_rate:.1%} of tokens hit with it")
    if needed is not None:
        parts.append(f"times {spec.fleet.waf:g} on flash over all drives")
    return "; ".join(parts)


def drive_writes_per_day(spec: PlanSpec, medium: Medium, daily: float) -> float | None:
    """W x WAF / (drives x capacity) for the fleet's writes per day; None without a capacity."""
    if medium.capacity is None:
        return None
    return daily * spec.fleet.waf / (_drives(spec, medium) * medium.capacity)


def _drives(spec: PlanSpec, medium: Medium) -> int:
    return medium.drives * (1 if medium.shared else spec.fleet.nodes)
