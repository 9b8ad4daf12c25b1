"""One candidate under one point of the load: simulated times, and where its resources saturate.

The simulation lets prefill and decode of an instance overlap freely. Saturation and money count both on the same GPUs,
because in the long run they share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rewarm.plan.cost import Costs
from rewarm.plan.load import Load, Means, Served, fleet_model
from rewarm.plan.media import Candidate
from rewarm.plan.result import Cell, Percentiles, Saturation
from rewarm.plan.simulate import Outcome, simulate
from rewarm.plan.spec import PlanSpec

WARMUP_SHARE = 0.2
"""Of a closed loop's requests: left out of its figures."""


@dataclass(frozen=True)
class Prepared:
    """A candidate at one point of the load before it is simulated: what its requests cost on average."""

    candidate: Candidate
    point: float
    served: Served
    means: Means
    saturation: Saturation


@dataclass(frozen=True)
class Assessment:
    """What a candidate does at one point of the load."""

    candidate: Candidate
    cell: Cell
    means: Means
    saturation: Saturation


def prepare(spec: PlanSpec, costs: Costs, load: Load, candidate: Candidate, point: float) -> Prepared:
    """Everything but the times."""
    served = load.serve(candidate, point)
    means = served.means(len(candidate.sources))
    return Prepared(candidate, point, served, means, saturation_of(spec, costs, candidate, means))


def run(spec: PlanSpec, costs: Costs, ready: Prepared) -> Assessment:
    """Simulate a prepared point."""
    requests = ready.served.requests
    outcome = simulate(fleet_model(spec, costs, ready.candidate), requests)
    cell = _cell(spec, ready.candidate, ready.point, outcome, requests.output_tokens, ready.means, ready.saturation)
    return Assessment(ready.candidate, cell, ready.means, ready.saturation)


def assess(spec: PlanSpec, costs: Costs, load: Load, candidate: Candidate, point: float) -> Assessment:
    """Simulate one point."""
    return run(spec, costs, prepare(spec, costs, load, candidate, point))


def _cell(
    spec: PlanSpec,
    candidate: Candidate,
    point: float,
    outcome: Outcome,
    output: NDArray[np.int64],
    means: Means,
    saturation: Saturation,
) -> Cell:
    shape = spec.workload.shape
    kept = np.ones(len(output), dtype=bool)
    if shape == "closed":
        kept = np.argsort(np.argsort(outcome.end_s)) >= WARMUP_SHARE * len(output)
    ttft, decode = outcome.ttft_s[kept], (outcome.end_s - outcome.first_s)[kept]
    several = output[kept] > 1
    start = float(outcome.end_s[~kept].max()) if shape == "closed" else float(outcome.arrival_s.min())
    wall = float(outcome.end_s[kept].max()) - start + (spec.engine.client_time if shape == "wave" else 0.0)
    requests_per_s = int(kept.sum()) / wall
    offered = point if shape in ("open", "trace") else None
    saturated = offered is not None and offered >= saturation.requests_per_s
    return Cell(
        medium=candidate.name,
        concurrency=int(point) if offered is None else None,
        requests_per_s=requests_per_s if offered is None else offered,
        ttft_s=percentiles(ttft),
        tpot_s=float((decode[several] / (output[kept][several] - 1)).mean()) if several.any() else None,
        output_tokens_per_s=float(output[kept].sum()) / wall,
        hit_tokens_share=means.hit_tokens / means.input_tokens,
        restoring_share=float(outcome.busy_s[:, :-1].mean(axis=0).max() / wall) if candidate.sources else 0.0,
        saturated=saturated,
        reason=_reason(candidate, means, saturation, saturated),
    )


def percentiles(values: NDArray[np.float64]) -> Percentiles:
    """Nearest-rank percentiles."""
    p50, p90, p99 = np.percentile(values, [50, 90, 99], method="inverted_cdf")
    return Percentiles(p50=float(p50), p90=float(p90), p99=float(p99))


def _reason(candidate: Candidate, means: Means, saturation: Saturation, saturated: bool) -> str:
    if saturated:
        return f"saturated: {saturation.limit} reaches its end at {saturation.requests_per_s:.3g} requests/s"
    if not candidate.sources:
        return f"every request computes {means.prefill_s:.3g} s of prefill"
    restored = sum(means.restore_bytes)
    parts = [f"restores {restored / 1e9:.3g} GB per request, limited by {_limits(candidate)}"] if restored else []
    if means.prefill_s > 0:
        parts.append(f"computes {means.prefill_s:.3g} s")
    if means.skipped_share > 0:
        parts.append(f"{means.skipped_share:.0%} of requests compute what is stored, because loading is slower")
    return "; ".join(parts)


def _limits(candidate: Candidate) -> str:
    return ", ".join(f"{source.limit} ({source.rate / 1e9:.3g} GB/s)" for source in candidate.sources)


def saturation_of(spec: PlanSpec, costs: Costs, candidate: Candidate, means: Means) -> Saturation:
    """The request rate of the fleet at which the first resource is busy all the time, and all the others' ends."""
    fleet = spec.fleet
    batch = min(costs.tpot[-1][0], spec.engine.max_sequences)
    gpu_s = means.prefill_s + means.output_tokens * costs.tpot_s(batch) / batch
    ends = {"GPU": fleet.nodes * fleet.instances_per_node / gpu_s}
    for source, size in zip(candidate.sources, means.restore_bytes, strict=True):
        if size > 0:
            ends[source.medium.name] = min(source.total_rate, fleet.nodes * source.node_rate) / size
    limit = min(ends, key=lambda name: ends[name])
    alone_s = sum(
        source.fixed_s + size / source.rate
        for source, size in zip(candidate.sources, means.restore_bytes, strict=True)
        if size > 0
    )
    cycle_s = alone_s + means.prefill_s + means.output_tokens * costs.tpot[0][1] + spec.workload.think_time
    return Saturation(
        medium=candidate.name,
        requests_per_s=ends[limit],
        limit=limit,
        ends=ends,
        knee_concurrency=ends[limit] * cycle_s / fleet.nodes,
        gpu_s_per_request=gpu_s,
        reason=_saturation_reason(ends, limit),
    )


def _saturation_reason(ends: dict[str, float], limit: str) -> str:
    others = sorted((end, name) for name, end in ends.items() if name != limit)
    after = f"; {others[0][1]} would go on to {others[0][0]:.3g}" if others else ""
    return f"{limit} is busy all the time at {ends[limit]:.3g} requests/s{after}"
