"""Every input of a plan with where its value comes from: measured, given in the plan file, or assumed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rewarm.geometry import Model
from rewarm.geometry.decode import DECODE_BANDWIDTH_SHARE
from rewarm.plan import hardware
from rewarm.plan.cost import Costs
from rewarm.plan.result import Input
from rewarm.plan.spec import PlanSpec

Origin = Literal["measured", "given", "assumed"]

_FALLBACKS: dict[str, tuple[Any, str]] = {
    "prices.gpu_hour": (hardware.GPU_HOUR_USD, hardware.GPU_HOUR_SOURCE),
    "prices.flash_per_tb": (hardware.FLASH_USD_PER_TB, hardware.FLASH_SOURCE),
    "prices.dram_per_gb": (hardware.DRAM_USD_PER_GB, hardware.DRAM_SOURCE),
    "engine.mfu": (0.5, "70B at 128K tokens on 4 H100 in about 20 s"),
    "engine.fixed_time": (0.0, "no fixed cost: calibrate with a benchmark"),
    "fleet.waf": (1.1, "large sequential writes, whole segments dropped"),
    "fleet.dram_read": (25e9, "one PCIe Gen4 x16 copy to the GPU, round figure"),
}
_MEASURED_FIELDS = {"prefill_tokens_per_s", "tpot", "effective_read"}
"""Fields that by their meaning hold measurements."""


def inputs_of(
    spec: PlanSpec, given: Mapping[str, Any], model: Model, costs: Costs, sources: Mapping[str, str]
) -> tuple[Input, ...]:
    """All inputs that have a value. `given` is the plan file's own table; `sources` names files of measured values."""
    found = [
        Input(name="model", value=model.name, origin="given"),
        Input(
            name="model.active_parameters", value=model.active_parameters,
            origin="given" if model.active_parameters_source == "published" else "assumed",
            source=model.active_parameters_source,
        ),
    ]  # fmt: skip
    for section in ("engine", "fleet", "workload", "objective", "prices"):
        table = given.get(section, {})
        found += _section(spec, section, getattr(spec, section), table, sources)
    tables = {entry.get("name"): entry for entry in given.get("medium", [])}
    for medium in spec.medium:
        found += _section(spec, f"medium.{medium.name}", medium, tables.get(medium.name, {}), sources)
        if medium.link_efficiency is None and medium.link is not None:
            share = hardware.LINK_EFFICIENCY.get(medium.protocol or "", hardware.DEFAULT_LINK_EFFICIENCY)
            found.append(Input(name=f"medium.{medium.name}.link_efficiency", value=share, origin="assumed"))
    if costs.tpot_source == "modelled":
        note = f"memory traffic at {DECODE_BANDWIDTH_SHARE:.0%} of peak; a lower bound for experts"
        found.append(Input(name="engine.tpot", value="modelled", origin="assumed", source=note))
    return tuple(found)


def _section(
    spec: PlanSpec, path: str, values: Any, table: Mapping[str, Any], sources: Mapping[str, str]
) -> list[Input]:
    found = []
    for field in values.__struct_fields__:
        name, value = f"{path}.{field}", getattr(values, field)
        if field == "name" or name in _unused(spec):
            continue
        origin, source = _origin(spec, name, field, field in table), sources.get(name, "")
        if origin == "assumed" and name in _FALLBACKS:
            value, source = _FALLBACKS[name]
        if value is None or value == () or (origin == "assumed" and name not in _FALLBACKS and not _matters(value)):
            continue
        found.append(Input(name=name, value=_plain(value), origin=origin, source=source))
    return found


def _unused(spec: PlanSpec) -> set[str]:
    """Defaults that this plan never looks at."""
    unused = set()
    if spec.engine.prefill_tokens_per_s is not None:
        unused.add("engine.mfu")
    if spec.engine.tpot is not None:
        unused.add("engine.weight_bits")
    if not spec.fleet.dram:
        unused |= {"fleet.dram_read", "prices.dram_per_gb"}
    if spec.workload.shape in ("wave", "trace"):
        unused.add("workload.requests")
    if spec.workload.shape == "trace":
        unused |= {"workload.output_tokens", "workload.hit_share"}
    else:
        unused.add("workload.trace_per_node")
    return unused


def _origin(spec: PlanSpec, name: str, field: str, in_file: bool) -> Origin:
    if name in spec.measured or (in_file and field in _MEASURED_FIELDS):
        return "measured"
    return "given" if in_file else "assumed"


def _matters(value: Any) -> bool:
    """Defaults that switch nothing on (0, false) are no assumption worth a line."""
    return bool(value)


def _plain(value: Any) -> str | float | int | bool | None:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {entry:g}" for key, entry in value.items())
    if isinstance(value, tuple):
        return ", ".join(f"{entry:g}" for entry in value)
    return value if isinstance(value, (str, float, int, bool)) else str(value)
