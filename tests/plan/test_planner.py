"""Whole plans: the verdict and what changes it, where values come from, money, writes, traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rewarm.errors import ConfigError
from rewarm.geometry import load_model
from rewarm.plan import Plan, TraceData, make_plan, make_spec
from rewarm.plan.assess import assess
from rewarm.plan.choose import choose
from rewarm.plan.cost import costs_of
from rewarm.plan.knobs import knobs_of
from rewarm.plan.load import SyntheticLoad
from rewarm.plan.media import candidates_of
from rewarm.plan.traceload import TraceLoad
from rewarm.workload import Requests, open_trace
from rewarm.workload.chains import SessionFinder, select

Table = Callable[..., dict[str, Any]]


def kind_of(table: dict[str, Any]) -> str:
    spec = make_spec(table)
    costs = costs_of(spec, load_model(spec.model), spec.workload.context_tokens or 0)
    return choose(spec, costs, SyntheticLoad(spec, costs), {}).candidate.kind


OPEN = {"shape": "open", "concurrency": None, "requests_per_s": [0.4], "requests": 500}


def test_each_verdict_has_its_case(table: Table) -> None:
    cases = {
        "one local drive": table(workload=OPEN),
        "several local drives": table(workload=OPEN, objective={"ttft_p90": "1.9s"}),
        "recompute": table(workload=OPEN | {"context_tokens": 500}),
        "shared array": table(
            workload=OPEN | {"requests_per_s": [0.6]}, objective={"ttft_p90": "8s"},
            fleet={"nodes": 8, "routing": "random"},
        ),
    }  # fmt: skip
    assert {name: kind_of(case) for name, case in cases.items()} == {name: name for name in cases}


def test_migration_turns_local_drives_into_an_array(table: Table) -> None:
    base = {"workload": OPEN | {"requests_per_s": [0.6]}, "objective": {"ttft_p90": "8s"}}
    assert kind_of(table(**base, fleet={"nodes": 8, "migrate": 0.0})) == "one local drive"
    assert kind_of(table(**base, fleet={"nodes": 8, "migrate": 0.5})) == "shared array"


def test_migration_is_named_among_what_would_change_the_verdict(table: Table) -> None:
    work = OPEN | {"requests_per_s": [0.6], "requests": 200}
    plan = make_plan(make_spec(table(workload=work, objective={"ttft_p90": "8s"}, fleet={"nodes": 8})))
    (change,) = [change for change in plan.verdict.changes if change.input == "fleet.migrate"]
    assert plan.verdict.kind == "one local drive"
    assert change.verdict == "shared array"
    assert 0 < change.turns_at < 0.2
    assert "fleet.migrate above" in plan.verdict.sentence


@pytest.fixture(scope="module")
def wave_plan() -> Plan:
    table = {
        "model": "Qwen3-Coder-480B-A35B",
        "engine": {"prefill_tokens_per_s": 2000, "fixed_time": "1s", "tpot": {"8": "20ms"}},
        "medium": [{"name": "local", "drive_read": "7GB/s", "capacity": "2TB", "dwpd": 1}],
        "fleet": {"tp": 8},
        "workload": {"shape": "wave", "concurrency": [4, 8], "context_tokens": 30208, "saved_tokens_per_s": 100},
        "objective": {"ttft_p90": "12s"},
        "measured": ["engine.fixed_time"],
    }
    return make_plan(make_spec(table), given=table, version="1")


def test_the_verdict_is_one_sentence_with_the_inputs_that_change_it(wave_plan: Plan) -> None:
    verdict = wave_plan.verdict
    assert verdict.kind == "one local drive"
    assert verdict.met
    assert verdict.sentence.startswith("One local drive is enough (local x 1): TTFT p90 ")
    assert verdict.sentence.count(". ") == 0
    assert 2 <= len(verdict.changes) <= 3
    for change in verdict.changes:
        assert change.text in verdict.sentence


def test_every_change_named_does_change_the_verdict(wave_plan: Plan, table: Table) -> None:
    base = table(
        engine={"gpus": None, "tpot": {"8": "20ms"}},
        medium=[{"name": "local", "drive_read": "7GB/s", "capacity": "2TB", "dwpd": 1}],
        workload={"concurrency": [8]}, objective={"ttft_p90": "12s"},
    )  # fmt: skip
    spec = make_spec(base)
    knobs = {knob.name: knob for knob in knobs_of(spec)}
    model = load_model(spec.model)
    daily = {"local": wave_plan.writes[0].bytes_per_day}
    for change in wave_plan.verdict.changes:
        knob = knobs[change.input]
        kinds = []
        # At the value named the verdict is the other one; a fifth of the way back it still is today's.
        for value in (change.turns_at, change.turns_at + 0.2 * (change.value - change.turns_at)):
            moved = knob.put(value)
            costs = costs_of(moved, model, moved.workload.context_tokens or 0)
            kinds.append(choose(moved, costs, SyntheticLoad(moved, costs), daily).candidate.kind)
        assert kinds == [change.verdict, "one local drive"], change.text


def test_an_objective_that_nothing_reaches_is_said(table: Table) -> None:
    spec = make_spec(table(objective={"ttft_p90": "10ms"}))
    verdict = make_plan(spec).verdict
    assert not verdict.met
    assert "nothing keeps to the objective of 10.0 ms" in verdict.sentence


def test_drives_that_wear_out_do_not_count(table: Table) -> None:
    heavy = table(
        medium=[{"name": "local", "drive_read": "7GB/s", "capacity": "2TB", "dwpd": 0.3}],
        workload={"saved_tokens_per_s": 150}, prices={"years": 4},
    )  # fmt: skip
    plan = make_plan(make_spec(heavy))
    (row,) = plan.writes
    assert row.bytes_per_day == pytest.approx(150 * 253_952 * 86_400)
    assert row.drive_writes_per_day == pytest.approx(row.bytes_per_day * 1.1 / 2e12)
    assert row.years == pytest.approx(5 * 0.3 / row.drive_writes_per_day)
    assert row.years < 4
    assert plan.verdict.kind == "several local drives"
    light = table(medium=heavy["medium"], workload={"saved_tokens_per_s": 15})
    assert make_plan(make_spec(light)).verdict.kind == "one local drive"


def test_inputs_say_where_they_come_from(wave_plan: Plan) -> None:
    origin = {row.name: row.origin for row in wave_plan.inputs}
    assert origin["engine.fixed_time"] == "measured"
    assert origin["engine.prefill_tokens_per_s"] == "measured"
    assert origin["medium.local.drive_read"] == "given"
    assert origin["workload.context_tokens"] == "given"
    assert origin["prices.gpu_hour"] == "assumed"
    source = {row.name: row.source for row in wave_plan.inputs}
    assert "2026" in source["prices.gpu_hour"]
    assert "engine.mfu" not in origin, "a measured prefill rate does not use it"


def test_break_even_is_where_loading_and_computing_meet(wave_plan: Plan) -> None:
    (row,) = wave_plan.break_even
    assert row.load_s == pytest.approx(1 + 30208 * 253_952 / 7e9)
    assert row.compute_s == pytest.approx(30208 / 2000)
    assert row.bandwidth_bytes_per_s == pytest.approx(30208 * 253_952 / (30208 / 2000 - 1))
    # 1 s + n x 253,952 / 7e9 = n / 2000
    assert row.length_tokens == pytest.approx(1 / (1 / 2000 - 253_952 / 7e9), abs=1)
    assert row.both_s < min(row.load_s, row.compute_s)


def test_saturation_and_money(wave_plan: Plan) -> None:
    by_name = {row.medium: row for row in wave_plan.saturation}
    size = 30208 * 253_952
    assert by_name["local"].ends["local"] == pytest.approx(7e9 / size)
    assert by_name["local"].limit == "local"
    gpu_s = 30208 / 2000 + 64 * 0.02 / 8
    assert by_name["recompute"].gpu_s_per_request == pytest.approx(gpu_s)
    assert by_name["recompute"].requests_per_s == pytest.approx(1 / gpu_s)
    money = {row.medium: row for row in wave_plan.money}
    dollars = gpu_s * 8 * 2.35 / 3600 / (30208 + 64) * 1e6
    assert money["recompute"].usd_per_million_tokens == pytest.approx(dollars)
    assert money["local"].storage_usd_per_hour == pytest.approx(660 / (4 * 8766))
    rent = 253_952 * 330e-12 / (4 * 8766 * 3600)
    assert money["local"].break_even_interval_s == pytest.approx(1 / 2000 * 8 * 2.35 / 3600 / rent)


def test_a_closed_loop_and_littles_law(table: Table) -> None:
    work = {"shape": "closed", "concurrency": [2, 16], "think_time": "2s", "requests": 400}
    spec = make_spec(table(workload=work))
    costs = costs_of(spec, load_model(spec.model), 30_208)
    load = SyntheticLoad(spec, costs)
    for candidate in candidates_of(spec)[1:]:
        for point in load.points:
            one = assess(spec, costs, load, candidate, point)
            cycle = one.cell.ttft_s.p50 + 63 * (one.cell.tpot_s or 0) + 2
            assert one.cell.requests_per_s * cycle == pytest.approx(point, rel=0.12)
            assert one.cell.requests_per_s <= one.saturation.requests_per_s * 1.05


def part_of(requests: Requests, count: int) -> Requests:
    keep = requests.arrival_s >= 0
    keep[count:] = False
    return select(requests, keep)


@pytest.fixture(scope="module")
def trace(conversation: Path) -> TraceData:
    """The first 1,500 requests of the conversation trace."""
    return TraceData(part_of(open_trace(conversation).load(), 1500), 512)


def trace_table(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": "Llama-3.3-70B",
        "engine": {"gpu": "H100", "gpus": 8, "fixed_time": "50ms"},
        "medium": [
            {"name": "local", "drives": 2, "drive_read": "6.9GB/s", "capacity": "2TB"},
            {"name": "array", "shared": True, "drives": 8, "drive_read": "6.9GB/s", "link": "100Gb/s", "ports": 2,
             "capacity": "8TB"},
        ],
        "stacks": [["local", "array"]],
        "fleet": {"tp": 8, "nodes": 3, "migrate": 0.3, "dram": "256GiB"},
        "workload": {"shape": "trace", "trace": "conversation.jsonl"},
    }  # fmt: skip
    return base | changes


@pytest.mark.scale
def test_a_trace_over_three_tiers(trace: TraceData) -> None:
    plan = make_plan(make_spec(trace_table()), trace=trace)
    cells = {cell.medium: cell for cell in plan.cells}
    assert list(cells) == ["recompute", "local", "array", "local+array"]
    # Each adds what the one before lacks: DRAM alone, what stays at home, what migrates.
    hits = [cells[name].hit_tokens_share for name in ("recompute", "local", "array", "local+array")]
    assert hits == sorted(hits)
    assert hits[0] < hits[1] < hits[2]
    assert cells["array"].ttft_s.p90 < cells["recompute"].ttft_s.p90
    assert [row.share_of_possible for row in plan.capacity][-1] == 1.0
    assert [row.cached_tokens for row in plan.capacity] == sorted(row.cached_tokens for row in plan.capacity)
    by_rule = {(row.medium, row.admission): row for row in plan.writes}
    assert by_rule["local", "second-sight"].written_share < 0.3
    assert by_rule["local", "second-sight"].bytes_per_day < by_rule["local", "all"].bytes_per_day
    assert any("sample" in note for note in plan.notes)


def test_a_small_drive_holds_less(trace: TraceData) -> None:
    shares = []
    for capacity in ("200GB", "700GB", "9TB"):
        medium = [{"name": "local", "drive_read": "6.9GB/s", "capacity": capacity}]
        table = trace_table(medium=medium, stacks=[], fleet={"tp": 8})
        spec = make_spec(table)
        load = TraceLoad(spec, costs_of(spec, load_model(spec.model), 12_000), trace)
        served = load.serve(candidates_of(spec)[1], 1.0)
        shares.append(served.means(1).hit_tokens)
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2]


def test_loading_that_is_slower_than_computing_is_not_done(table: Table) -> None:
    slow = [{"name": "tape", "drive_read": "100MB/s"}]
    plan = make_plan(make_spec(table(medium=slow)))
    recompute, tape = plan.cells
    assert tape.ttft_s == recompute.ttft_s
    assert tape.hit_tokens_share == 0
    assert "loading is slower" in tape.reason


def test_a_trace_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"workload\.trace: the trace has to be read by the caller"):
        make_plan(make_spec(trace_table()))


def test_a_sample_keeps_rate_and_hits(trace: TraceData) -> None:
    spec = make_spec(trace_table())
    costs = costs_of(spec, load_model(spec.model), 12_000)
    whole = TraceLoad(spec, costs, trace)
    part = whole.sample(2000)
    assert 0.3 < part.scale < 0.6
    assert len(part.data.requests) < len(trace.requests)
    assert part.points[0] == pytest.approx(whole.points[0], rel=0.1)
    for candidate in candidates_of(spec)[1:]:
        means = [load.serve(candidate, 1.0).means(len(candidate.sources)) for load in (whole, part)]
        assert means[1].hit_tokens == pytest.approx(means[0].hit_tokens, rel=0.35)
    sessions = SessionFinder(512).assign(trace.requests)
    assert len(set(part.data.requests.session.tolist())) < len(set(sessions.tolist()))


def test_the_same_plan_twice_is_the_same(table: Table) -> None:
    spec = make_spec(table(workload=OPEN | {"requests": 60}, fleet={"nodes": 4, "migrate": 0.2}))
    assert msgspec.json.encode(make_plan(spec)) == msgspec.json.encode(make_plan(spec))
