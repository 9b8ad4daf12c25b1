"""The inputs of a plan that can be moved to see whether the verdict holds: name, value, the plan with another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from rewarm.plan.hardware import GPU_HOUR_USD
from rewarm.plan.media import source_of
from rewarm.plan.money import medium_usd, rates_of
from rewarm.plan.spec import PlanSpec
from rewarm.units import format_duration, format_rate


@dataclass(frozen=True)
class Knob:
    """An input: its name, its value now, and the plan with another value. `shares` are tried instead of factors."""

    name: str
    value: float
    put: Callable[[float], PlanSpec]
    show: Callable[[float], str]
    shares: bool = False


def knobs_of(spec: PlanSpec) -> list[Knob]:
    """All of them, in the order of the plan file."""
    return [*_engine(spec), *_media(spec), *_fleet(spec), *_workload(spec), *_prices(spec), *_objective(spec)]


def _in(spec: PlanSpec, section: str, **fields: object) -> PlanSpec:
    part = msgspec.structs.replace(getattr(spec, section), **fields)
    return msgspec.structs.replace(spec, **{section: part})


def _in_medium(spec: PlanSpec, index: int, **fields: object) -> PlanSpec:
    changed = msgspec.structs.replace(spec.medium[index], **fields)
    return msgspec.structs.replace(spec, medium=(*spec.medium[:index], changed, *spec.medium[index + 1 :]))


def _engine(spec: PlanSpec) -> list[Knob]:
    rate = spec.engine.prefill_tokens_per_s
    if rate is None:
        return [Knob("engine.mfu", spec.engine.mfu, lambda v: _in(spec, "engine", mfu=min(v, 1.0)), _share)]
    put = lambda v: _in(spec, "engine", prefill_tokens_per_s=v)  # noqa: E731
    return [Knob("engine.prefill_tokens_per_s", rate, put, _count)]


def _media(spec: PlanSpec) -> list[Knob]:
    return [knob for index in range(len(spec.medium)) for knob in _medium(spec, index)]


def _medium(spec: PlanSpec, index: int) -> list[Knob]:
    medium = spec.medium[index]
    source = source_of(medium, spec)
    put_rate = lambda v: _in_medium(spec, index, effective_read=v)  # noqa: E731
    put_fixed = lambda v: _in_medium(spec, index, fixed_time=v)  # noqa: E731
    put_capacity = lambda v: _in_medium(spec, index, capacity=v)  # noqa: E731
    knobs = [Knob(f"read rate of {medium.name}", source.rate, put_rate, format_rate)]
    if source.fixed_s > 0:
        knobs.append(Knob(f"fixed time of {medium.name}", source.fixed_s, put_fixed, format_duration))
    if medium.capacity is not None and spec.workload.shape == "trace":
        knobs.append(Knob(f"capacity of a drive of {medium.name}", medium.capacity, put_capacity, _terabytes))
    return knobs


def _fleet(spec: PlanSpec) -> list[Knob]:
    fleet = spec.fleet
    if fleet.nodes == 1 or fleet.routing == "random":
        return []
    return [Knob("fleet.migrate", fleet.migrate, lambda v: _in(spec, "fleet", migrate=v), _share, shares=True)]


def _workload(spec: PlanSpec) -> list[Knob]:
    work = spec.workload
    if work.context_tokens is None:
        return []
    put_context = lambda v: _in(spec, "workload", context_tokens=max(round(v), 1))  # noqa: E731
    put_hits = lambda v: _in(spec, "workload", hit_share=v)  # noqa: E731
    knobs = [
        Knob("workload.context_tokens", float(work.context_tokens), put_context, _count),
        Knob("workload.hit_share", work.hit_share, put_hits, _share, shares=True),
    ]
    if work.shape == "open":
        put_rate = lambda v: _in(spec, "workload", requests_per_s=(v,))  # noqa: E731
        knobs.append(Knob("workload.requests_per_s", max(work.requests_per_s), put_rate, lambda v: f"{v:.3g}"))
    else:
        put_count = lambda v: _in(spec, "workload", concurrency=(max(round(v), 1),))  # noqa: E731
        knobs.append(Knob("workload.concurrency", float(max(work.concurrency)), put_count, _count))
    return knobs


def _prices(spec: PlanSpec) -> list[Knob]:
    rates = rates_of(spec)
    gpu_hour = GPU_HOUR_USD if spec.prices.gpu_hour is None else spec.prices.gpu_hour
    knobs = []
    if gpu_hour > 0:
        knobs.append(Knob("prices.gpu_hour", gpu_hour, lambda v: _in(spec, "prices", gpu_hour=v), _usd))
    if any(medium_usd(spec, medium, rates) > 0 for medium in spec.medium):
        # Storage gets dearer by being written off faster: drives, chassis and DRAM alike.
        put = lambda v: _in(spec, "prices", years=v)  # noqa: E731
        knobs.append(Knob("prices.years", spec.prices.years, put, lambda v: f"{v:.3g} years"))
    return knobs


def _objective(spec: PlanSpec) -> list[Knob]:
    bounds = {name: getattr(spec.objective, name) for name in spec.objective.__struct_fields__}
    return [_bound(spec, name, bound) for name, bound in bounds.items() if bound is not None]


def _bound(spec: PlanSpec, name: str, bound: float) -> Knob:
    return Knob(f"objective.{name}", bound, lambda v: _in(spec, "objective", **{name: v}), format_duration)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value * 100:.3g}%"


def _usd(value: float) -> str:
    return f"{value:.3g} USD"


def _terabytes(value: float) -> str:
    return f"{value / 1e12:.2f} TB"
