"""Plan files: what is read, and what is refused with the field's name and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rewarm.errors import ConfigError
from rewarm.geometry import load_model
from rewarm.plan import PlanSpec, apply_probe, make_plan, make_spec, parse_plan
from rewarm.plan.cost import costs_of
from rewarm.plan.media import source_of

Table = Callable[..., dict[str, Any]]


def test_units_are_read(table: Table) -> None:
    spec = make_spec(table(engine={"fixed_time": "250ms"}, fleet={"dram": "512GiB", "staging": "64GB"}))
    assert spec.engine.fixed_time == 0.25
    assert spec.engine.tpot == {"8": 0.02, "32": 0.03}
    assert spec.medium[0].drive_read == 7e9
    assert spec.medium[0].capacity == 2e12
    assert spec.medium[1].link == 12.5e9
    assert spec.fleet.dram == 512 * 2**30
    assert spec.fleet.staging == 64e9


LOCAL = {"name": "local", "drive_read": "7GB/s"}
ARRAY = {"name": "array", "shared": True, "drive_read": "7GB/s", "link": "100Gb/s"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"modle": "x"}, "unknown key 'modle'; did you mean 'model'"),
    "unknown field": ({"engine": {"fixd_time": 1}}, "unknown key 'engine.fixd_time'; did you mean 'fixed_time'"),
    "unknown field of a medium": ({"medium": [LOCAL | {"driv": 1}]}, r"unknown key 'medium\[0\].driv'"),
    "wrong type": ({"fleet": {"nodes": "eight"}}, "fleet.nodes: Expected `int`"),
    "bad unit": ({"medium": [LOCAL | {"drive_read": "7parsec/s"}]}, r"medium\[0\].drive_read: unknown unit 'parsec'"),
    "zero bandwidth": ({"medium": [LOCAL | {"drive_read": 0}]}, "medium.local.drive_read is 0.* allowed: above 0"),
    "negative bandwidth": ({"medium": [LOCAL | {"effective_read": -1}]}, "medium.local.effective_read is -1"),
    "infinite bandwidth": ({"medium": [LOCAL | {"drive_read": float("inf")}]}, "drive_read is inf"),
    "not a number": ({"medium": [LOCAL | {"drive_read": float("nan")}]}, "drive_read is nan"),
    "no bandwidth": ({"medium": [{"name": "local"}]}, "medium.local.drive_read is missing"),
    "no link": ({"medium": [{k: v for k, v in ARRAY.items() if k != "link"}]}, "medium.array.link is missing"),
    "ports of a local drive": ({"medium": [LOCAL | {"ports": 2}]}, "medium.local.ports is 2"),
    "protocol": ({"medium": [ARRAY | {"protocol": "iscsi"}]}, "allowed: pcie, nvme-rdma, nvme-tcp, nfs"),
    "two of a name": ({"medium": [LOCAL, LOCAL]}, "allowed: different names"),
    "reserved name": ({"medium": [LOCAL | {"name": "recompute"}]}, "not 'recompute'"),
    "no media": ({"medium": []}, "medium is missing"),
    "efficiency": ({"medium": [LOCAL | {"raid_efficiency": 1.5}]}, "raid_efficiency is 1.5; allowed: above 0"),
    "no engine": ({"engine": {"prefill_tokens_per_s": None}}, "engine.prefill_tokens_per_s is missing"),
    "two engines": ({"engine": {"gpu": "H100", "peak_flops": 1e15}}, "either it or engine.gpu"),
    "mfu": ({"engine": {"mfu": 1.2}}, "engine.mfu is 1.2; allowed: above 0, at most 1"),
    "gpus against tp": ({"engine": {"gpus": 6}}, "engine.gpus is 6; allowed: a multiple of fleet.tp = 8"),
    "tpot keys": ({"engine": {"tpot": {"many": "1ms"}}}, "engine.tpot.many"),
    "tpot zero": ({"engine": {"tpot": {"8": 0}}}, "engine.tpot.8 is 0"),
    "no nodes": ({"fleet": {"nodes": 0}}, "fleet.nodes is 0; allowed: 1 to"),
    "migrate": ({"fleet": {"migrate": 1.5}}, "fleet.migrate is 1.5; allowed: 0 to 1"),
    "random and migrate": ({"fleet": {"migrate": 0.1, "routing": "random"}}, "fleet.migrate is 0.1"),
    "routing": ({"fleet": {"routing": "psychic"}}, "fleet.routing: Invalid enum value 'psychic'"),
    "admission": ({"fleet": {"admission": "third-sight"}}, "fleet.admission is 'third-sight'; allowed: 'all'"),
    "order": ({"fleet": {"order": "alphabetical"}}, "fleet.order"),
    "shape": ({"workload": {"shape": "spiral"}}, "workload.shape"),
    "no concurrency": ({"workload": {"concurrency": None}}, "workload.concurrency is missing"),
    "zero concurrency": ({"workload": {"concurrency": [0]}}, "workload.concurrency is 0"),
    "no context": ({"workload": {"context_tokens": None}}, "workload.context_tokens is missing"),
    "absurd context": ({"workload": {"context_tokens": 10**12}}, "workload.context_tokens is 1000000000000"),
    "rate of a wave": ({"workload": {"requests_per_s": [1.0]}}, "nothing for shape 'wave'"),
    "hit share": ({"workload": {"hit_share": 2}}, "workload.hit_share is 2"),
    "objective": ({"objective": {"ttft_p90": "0s"}}, "objective.ttft_p90 is 0"),
    "price": ({"prices": {"gpu_hour": -1}}, "prices.gpu_hour is -1"),
    "years": ({"prices": {"years": 0}}, "prices.years is 0"),
    "measured": ({"measured": ["engine.speed"]}, "measured is 'engine.speed'"),
    "stack": ({"stacks": [["local", "tape"]]}, "stacks is"),
    "seed": ({"seed": -1}, "seed is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_cannot_be_is_refused_by_field(table: Table, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make_spec(table(**changes), "my.toml")


def test_errors_name_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^my\.toml is not TOML"):
        parse_plan("model = ", "my.toml")
    with pytest.raises(ConfigError, match=r"^my\.toml: engine\.prefill_tokens_per_s"):
        parse_plan('model = "x"\nmedium = []\n[engine]\n[workload]\nshape = "wave"', "my.toml")


def test_what_only_the_model_can_tell(table: Table) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.tp: tp=5 does not divide the 96 attention heads"):
        costs_for(make_spec(table(fleet={"tp": 5}, engine={"gpus": 5})))
    with pytest.raises(ConfigError, match="did you mean"):
        make_plan(make_spec(table(model="Qwen3-Codr-480B-A35B")))
    with pytest.raises(ConfigError, match=r"engine\.tpot is missing"):
        costs_for(make_spec(table(engine={"tpot": None})))
    with pytest.raises(ConfigError, match="unknown GPU 'H1000'"):
        costs_for(make_spec(table(engine={"prefill_tokens_per_s": None, "gpu": "H1000"})))


def costs_for(spec: PlanSpec) -> object:
    return costs_of(spec, load_model(spec.model), 1000)


def test_the_smallest_part_limits_a_medium(table: Table) -> None:
    spec = make_spec(table())
    local, array = (source_of(medium, spec) for medium in spec.medium)
    assert (local.rate, local.limit) == (7e9, "drives")
    assert (array.total_rate, array.limit) == (pytest.approx(11.25e9), "node's port")
    media = [
        LOCAL | {"reader": "1GB/s"},
        ARRAY | {"drives": 1, "ports": 2, "protocol": "nvme-tcp", "host_copy": "9GB/s"},
    ]
    spec = make_spec(table(medium=media))  # fmt: skip
    local, array = (source_of(medium, spec) for medium in spec.medium)
    assert (local.rate, local.limit) == (1e9, "reader")
    assert (array.total_rate, array.total_limit, array.limit) == (7e9, "drives", "drives")
    assert array.node_rate == pytest.approx(9e9)


def test_a_probe_file_gives_measured_rates(table: Table) -> None:
    media = [{"name": "local", "drives": 2, "probe": "p.json"}, {"name": "array", "shared": True, "probe": "p.json"}]
    probe = '{"schema": 1, "read_bytes_per_s": 1e10, "write_bytes_per_s": 4e9, "readings": []}'
    spec = make_spec(table(medium=media))
    for name in ("local", "array"):
        spec = apply_probe(spec, name, probe, "p.json")
    assert (spec.medium[0].drive_read, spec.medium[0].drive_write) == (5e9, 2e9)
    assert spec.medium[1].effective_read == 1e10
    assert "medium.local.drive_read" in spec.measured
    with pytest.raises(ConfigError, match=r"p\.json is not the file of a probe"):
        apply_probe(spec, "local", "{}", "p.json")
    with pytest.raises(ConfigError, match=r"medium\.local\.drive_read: given beside a probe file"):
        apply_probe(spec, "local", probe, "p.json")
