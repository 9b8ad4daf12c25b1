"""Refuses what cannot be: each check names the field and what is allowed. Knows the spec, not the model."""

from __future__ import annotations

import math
import re
from typing import Any

from rewarm.errors import ConfigError
from rewarm.plan.hardware import LINK_EFFICIENCY
from rewarm.plan.spec import SECTIONS, Engine, Fleet, Medium, PlanSpec, Workload

CONCURRENCY_MAX = 4096
REQUESTS_MAX = 1_000_000
NODES_MAX = 1024
DRIVES_MAX = 1024
TOKENS_MAX = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADMISSION = re.compile(r"all|second-sight|min-tokens=[1-9][0-9]{0,8}")


def check_spec(spec: PlanSpec, where: str) -> None:
    """Raise `ConfigError` for the first field that is missing, contradictory or absurd."""
    check = _Checker(where)
    _check_engine(check, spec.engine, spec.fleet)
    _check_media(check, spec)
    _check_fleet(check, spec.fleet)
    _check_workload(check, spec.workload)
    for name in spec.objective.__struct_fields__:
        check.above(f"objective.{name}", getattr(spec.objective, name))
    for name in ("gpu_hour", "flash_per_tb", "dram_per_gb"):
        check.at_least(f"prices.{name}", getattr(spec.prices, name), 0)
    check.above("prices.years", spec.prices.years)
    _check_measured(check, spec)
    if spec.seed < 0:
        check.fail("seed", spec.seed, "0 or more")


class _Checker:
    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, field: str, value: Any, allowed: str) -> None:
        raise ConfigError(f"{self._where}: {field} is {value!r}; allowed: {allowed}")

    def missing(self, field: str, advice: str) -> None:
        raise ConfigError(f"{self._where}: {field} is missing; {advice}")

    def above(self, field: str, value: float | None, most: float = math.inf) -> None:
        if value is not None and (not 0 < value <= most or value == math.inf):
            self.fail(field, value, "above 0" + ("" if most == math.inf else f", at most {most:g}"))

    def at_least(self, field: str, value: float | None, least: float) -> None:
        if value is not None and not least <= value < math.inf:
            self.fail(field, value, f"{least:g} or more")

    def between(self, field: str, value: float | None, least: float, most: float) -> None:
        if value is not None and not least <= value <= most:
            self.fail(field, value, f"{least:g} to {most:g}")


def _check_engine(check: _Checker, engine: Engine, fleet: Fleet) -> None:
    if engine.prefill_tokens_per_s is None and engine.peak_flops is None and engine.gpu is None:
        check.missing("engine.prefill_tokens_per_s", "give a measured rate, or engine.gpu, or engine.peak_flops")
    if engine.peak_flops is not None and engine.gpu is not None:
        check.fail("engine.peak_flops", engine.peak_flops, f"either it or engine.gpu ({engine.gpu}), not both")
    check.above("engine.prefill_tokens_per_s", engine.prefill_tokens_per_s)
    check.above("engine.peak_flops", engine.peak_flops)
    check.above("engine.hbm_read", engine.hbm_read)
    check.above("engine.mfu", engine.mfu, 1)
    check.between("engine.weight_bits", engine.weight_bits, 2, 32)
    check.at_least("engine.fixed_time", engine.fixed_time, 0)
    check.at_least("engine.client_time", engine.client_time, 0)
    check.between("engine.max_sequences", engine.max_sequences, 1, REQUESTS_MAX)
    check.between("fleet.tp", fleet.tp, 1, NODES_MAX)
    if engine.gpus is not None and (engine.gpus < 1 or engine.gpus % fleet.tp):
        check.fail("engine.gpus", engine.gpus, f"a multiple of fleet.tp = {fleet.tp}")
    for name, value in (engine.tpot or {}).items():
        if not name.isdigit() or int(name) < 1:
            check.fail(f"engine.tpot.{name}", value, "the keys are concurrencies, 1 or more")
        check.above(f"engine.tpot.{name}", value)
    if engine.tpot == {}:
        check.missing("engine.tpot", "leave it out, or give seconds by concurrency")


def _check_media(check: _Checker, spec: PlanSpec) -> None:
    if not spec.medium:
        check.missing("medium", "a plan compares at least one [[medium]] with recompute")
    names = [medium.name for medium in spec.medium]
    for index, medium in enumerate(spec.medium):
        path = f"medium[{index}]"
        if not _NAME.fullmatch(medium.name) or medium.name in ("recompute", "dram"):
            check.fail(f"{path}.name", medium.name, "letters, digits, '.', '_', '-'; not 'recompute' or 'dram'")
        if names.count(medium.name) > 1:
            check.fail(f"{path}.name", medium.name, "different names")
        _check_medium(check, medium, f"medium.{medium.name}")
    for stack in spec.stacks:
        if len(stack) < 2 or len(set(stack)) < len(stack) or any(name not in names for name in stack):
            check.fail("stacks", list(stack), f"lists of two or more different media of {', '.join(names)}")


def _check_medium(check: _Checker, medium: Medium, path: str) -> None:
    if medium.drive_read is None and medium.effective_read is None and medium.probe is None:
        check.missing(f"{path}.drive_read", "give it, or effective_read, or a probe file")
    for name in ("drive_read", "drive_write", "link", "node_link", "host_copy", "reader", "effective_read",
                 "capacity", "dwpd"):  # fmt: skip
        check.above(f"{path}.{name}", getattr(medium, name))
    check.above(f"{path}.raid_efficiency", medium.raid_efficiency, 1)
    check.above(f"{path}.link_efficiency", medium.link_efficiency, 1)
    check.between(f"{path}.drives", medium.drives, 1, DRIVES_MAX)
    check.between(f"{path}.ports", medium.ports, 1, DRIVES_MAX)
    check.at_least(f"{path}.fixed_time", medium.fixed_time, 0)
    check.at_least(f"{path}.drive_price", medium.drive_price, 0)
    check.at_least(f"{path}.extra_price", medium.extra_price, 0)
    if medium.protocol is not None and medium.protocol not in LINK_EFFICIENCY:
        check.fail(f"{path}.protocol", medium.protocol, ", ".join(LINK_EFFICIENCY))
    if not medium.shared and (medium.ports != 1 or medium.node_link is not None):
        check.fail(f"{path}.ports", medium.ports, "ports and node_link belong to a medium with shared = true")
    if medium.shared and medium.link is None and medium.effective_read is None and medium.probe is None:
        check.missing(f"{path}.link", "a shared medium has a link: give its rate, or a measured effective_read")


def _check_fleet(check: _Checker, fleet: Fleet) -> None:
    check.between("fleet.nodes", fleet.nodes, 1, NODES_MAX)
    check.between("fleet.instances_per_node", fleet.instances_per_node, 1, NODES_MAX)
    check.between("fleet.migrate", fleet.migrate, 0, 1)
    check.between("fleet.drives_max", fleet.drives_max, 1, DRIVES_MAX)
    check.at_least("fleet.dram", fleet.dram, 0)
    check.above("fleet.dram_read", fleet.dram_read)
    check.above("fleet.staging", fleet.staging)
    check.at_least("fleet.waf", fleet.waf, 1)
    if fleet.routing == "random" and fleet.migrate:
        check.fail("fleet.migrate", fleet.migrate, "0 with routing = 'random', which moves every turn already")
    if not _ADMISSION.fullmatch(fleet.admission):
        check.fail("fleet.admission", fleet.admission, "'all', 'second-sight' or 'min-tokens=N'")


_NEEDS = {"wave": "concurrency", "closed": "concurrency", "open": "requests_per_s", "trace": "trace"}


def _check_workload(check: _Checker, work: Workload) -> None:
    need = _NEEDS[work.shape]
    if not getattr(work, need):
        check.missing(f"workload.{need}", f"a workload of shape {work.shape!r} needs it")
    for other in set(_NEEDS.values()) - {need}:
        if getattr(work, other):
            check.fail(f"workload.{other}", getattr(work, other), f"nothing for shape {work.shape!r}")
    if work.shape == "trace":
        if work.context_tokens is not None or work.hit_share != 1:
            check.fail("workload.context_tokens", work.context_tokens, "nothing: a trace has its own lengths and hits")
    elif work.context_tokens is None:
        check.missing("workload.context_tokens", "give the tokens that a request restores")
    check.between("workload.context_tokens", work.context_tokens, 1, TOKENS_MAX)
    check.between("workload.new_tokens", work.new_tokens, 0, TOKENS_MAX)
    check.between("workload.output_tokens", work.output_tokens, 1, TOKENS_MAX)
    check.between("workload.hit_share", work.hit_share, 0, 1)
    check.between("workload.requests", work.requests, 10, REQUESTS_MAX)
    check.at_least("workload.think_time", work.think_time, 0)
    check.above("workload.saved_tokens_per_s", work.saved_tokens_per_s)
    for value in work.concurrency:
        check.between("workload.concurrency", value, 1, CONCURRENCY_MAX)
    for rate in work.requests_per_s:
        check.above("workload.requests_per_s", rate)


def _check_measured(check: _Checker, spec: PlanSpec) -> None:
    for name in spec.measured:
        section, _, field = name.rpartition(".")
        media = {f"medium.{medium.name}" for medium in spec.medium}
        struct = SECTIONS["medium"] if section in media else SECTIONS.get(section)
        if struct is None or section == "medium" or field not in struct.__struct_fields__:
            check.fail("measured", name, "names of fields such as 'engine.tpot' or 'medium.NAME.drive_read'")
