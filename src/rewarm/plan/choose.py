"""Which candidate: the cheapest that reaches the objective at the heaviest point of the load.

Without an objective a candidate must be no slower than recompute at the 90th percentile. A candidate whose resources
end below the offered rate, or whose drives wear out before they are written off, does not count as reaching it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rewarm.plan.assess import Assessment, Prepared, prepare, run
from rewarm.plan.capacity import RATED_YEARS, drive_writes_per_day
from rewarm.plan.cost import Costs
from rewarm.plan.load import Load
from rewarm.plan.media import Candidate, candidates_of, drive_counts
from rewarm.plan.money import storage_usd_per_hour, usd_per_million_tokens
from rewarm.plan.spec import PlanSpec

_SAME_COST = 1.001
"""Costs nearer than this are equal: then less storage to buy decides, then less to build."""

_SAME_TIME = 1.03
"""Times nearer than this are equal."""


@dataclass(frozen=True)
class Choice:
    """The candidate taken, what it does, and whether it reaches the objective: `bounds_s` by percentile."""

    assessment: Assessment
    usd_per_million_tokens: float
    bounds_s: dict[str, float]
    met: bool

    @property
    def candidate(self) -> Candidate:
        """The candidate taken."""
        return self.assessment.candidate


def options_of(spec: PlanSpec) -> list[Candidate]:
    """All candidates of the verdict: recompute, local media at several numbers of drives, arrays, stacks."""
    others = [c for c in candidates_of(spec) if c.kind not in ("one local drive", "several local drives")]
    return [*others, *drive_counts(spec)]


def heaviest(load: Load) -> float:
    """The point of the load that the verdict is about."""
    return max(load.points)


def choose(
    spec: PlanSpec,
    costs: Costs,
    load: Load,
    daily_writes: dict[str, float],
    known: Sequence[Assessment] = (),
) -> Choice:
    """Assess the options from the cheapest up and take the first that counts. `daily_writes` are bytes per day of the
    fleet by medium; `known` are options that were assessed at the heaviest point already."""
    point = heaviest(load)
    done = {one.candidate.sources: one for one in known}
    ready = [prepare(spec, costs, load, option, point) for option in options_of(spec)]

    def assessed(one: Prepared) -> Assessment:
        if one.candidate.sources not in done:
            done[one.candidate.sources] = run(spec, costs, one)
        return replace(done[one.candidate.sources], candidate=one.candidate)

    def cost(one: Prepared) -> float:
        offered = spec.workload.shape in ("open", "trace")
        return usd_per_million_tokens(spec, one, point if offered else assessed(one).cell.requests_per_s)

    bounds = objective_of(spec) or {"p90": assessed(ready[0]).cell.ttft_s.p90 * (1 + 1e-9)}
    priced = sorted(((cost(one), index, one) for index, one in enumerate(ready)), key=lambda row: row[:2])
    found: list[tuple[float, Assessment]] = []
    for price, _, one in priced:
        if found and price > found[0][0] * _SAME_COST:
            break
        if why_not(spec, assessed(one), bounds, daily_writes) is None:
            found.append((price, assessed(one)))
    if found:
        price, best = min(found, key=lambda row: _effort(spec, row[1].candidate))
        return Choice(best, price, bounds, True)
    price, best = _fastest([(price, assessed(one)) for price, _, one in priced])
    return Choice(best, price, bounds, False)


def objective_of(spec: PlanSpec) -> dict[str, float]:
    """The bounds that the plan gives, by percentile."""
    bounds = {"p50": spec.objective.ttft_p50, "p90": spec.objective.ttft_p90, "p99": spec.objective.ttft_p99}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def why_not(spec: PlanSpec, one: Assessment, bounds_s: dict[str, float], daily_writes: dict[str, float]) -> str | None:
    """Why a candidate does not reach the objective; None when it does."""
    if one.cell.saturated:
        return one.cell.reason
    for name, bound in bounds_s.items():
        reached = getattr(one.cell.ttft_s, name)
        if reached > bound:
            return f"TTFT {name} of {reached:.3g} s is above {bound:.3g} s"
    for source in one.candidate.sources:
        medium, daily = source.medium, daily_writes.get(source.medium.name)
        if daily is None or medium.dwpd is None:
            continue
        needed = drive_writes_per_day(spec, medium, daily)
        if needed and RATED_YEARS * medium.dwpd / needed < spec.prices.years:
            return f"{medium.name} would need {needed:.2g} drive writes per day of its rated {medium.dwpd:g}"
    return None


def _effort(spec: PlanSpec, candidate: Candidate) -> tuple[float, int, int]:
    """Where costs are equal: less storage to buy comes first, then less to build."""
    kinds = ("recompute", "one local drive", "several local drives", "shared array", "tiers")
    drives = sum(source.medium.drives for source in candidate.sources)
    return storage_usd_per_hour(spec, candidate), kinds.index(candidate.kind), drives


def _fastest(priced: Sequence[tuple[float, Assessment]]) -> tuple[float, Assessment]:
    """Where nothing reaches the objective: the cheapest of those that are as good as the fastest."""
    best = min((one.cell.saturated, one.cell.ttft_s.p90) for _, one in priced)
    near = [row for row in priced if (row[1].cell.saturated, row[1].cell.ttft_s.p90 / _SAME_TIME) <= best]
    return min(near, key=lambda row: row[0])
