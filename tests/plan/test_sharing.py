"""The published sizing rule: one array per 8 nodes on one port of 100 GbE."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from rewarm.geometry import load_model
from rewarm.plan import make_spec, parse_plan
from rewarm.plan.assess import assess
from rewarm.plan.cost import costs_of
from rewarm.plan.load import SyntheticLoad
from rewarm.plan.media import candidates_of
from rewarm.plan.result import Sharing
from rewarm.plan.sharing import duty_limit, mean_s, median_s, nodes_limit, others, sharing_of

RULE = Path(__file__).resolve().parents[2] / "examples" / "plans" / "published-rule.toml"
ARRAY, LOCAL = 10.5e9, 6.94e9


def test_others_are_binomial() -> None:
    chances = others(8, 0.1)
    assert chances.sum() == pytest.approx(1)
    assert chances[0] == pytest.approx(0.9**7)
    assert chances @ np.arange(8) == pytest.approx(0.7)


def test_with_two_nodes_at_once_the_array_is_slower_than_a_drive() -> None:
    assert median_s(1.0, 1, 1.0, ARRAY, ARRAY) < 1 / LOCAL < median_s(1.0, 2, 1.0, ARRAY, ARRAY)


def test_duties_of_the_published_readings() -> None:
    median = duty_limit(median_s, 1 / LOCAL, 1.0, 8, ARRAY, ARRAY)
    mean = duty_limit(mean_s, 1 / LOCAL, 1.0, 8, ARRAY, ARRAY)
    assert median == pytest.approx(0.09, abs=0.005)
    assert (1 - median) ** 7 == pytest.approx(0.5)
    assert mean == pytest.approx(0.07, abs=0.005)
    assert 1 + 7 * mean == pytest.approx(ARRAY / LOCAL)


def test_the_curve_is_the_other_way_round() -> None:
    for nodes in (2, 5, 8, 40):
        for statistic in (mean_s, median_s):
            duty = duty_limit(statistic, 1 / LOCAL, 1.0, nodes, ARRAY, ARRAY)
            assert nodes_limit(statistic, 1 / LOCAL, 1.0, duty * 0.999, ARRAY, ARRAY) == nodes
            assert nodes_limit(statistic, 1 / LOCAL, 1.0, duty * 1.001, ARRAY, ARRAY) == nodes - 1
    assert nodes_limit(mean_s, 1 / LOCAL, 1.0, 0.0, ARRAY, ARRAY) is None
    assert nodes_limit(mean_s, 1 / LOCAL, 1.0, 0.5, LOCAL / 2, ARRAY) == 0
    assert duty_limit(mean_s, 1 / LOCAL, 1.0, 8, LOCAL / 2, ARRAY) == 0
    assert duty_limit(mean_s, 1 / LOCAL, 1.0, 8, ARRAY, 8 * LOCAL) == 1


def sharing(**fleet: float) -> Sharing:
    table = tomllib.loads(RULE.read_text())
    table["fleet"] |= fleet
    spec = make_spec(table)
    (found,) = sharing_of(spec, costs_of(spec, load_model(spec.model), 30_208), 30_208)
    return found


def test_the_example_answers_the_rule() -> None:
    found = sharing()
    assert (found.nodes, found.ports) == (8, 1)
    assert found.duty_by_median == pytest.approx(0.094, abs=0.001)
    assert found.duty_by_mean == pytest.approx(0.073, abs=0.001)
    assert "less than 7.3% of the time" in found.verdict
    assert found.by_ports["1"] == pytest.approx(found.duty_by_mean)
    assert found.by_ports["1"] < found.by_ports["2"] < found.by_ports["4"] < found.by_ports["8"] == 1
    against_recompute = [point.nodes_against_recompute or 999 for point in found.curve]
    assert all(many >= 8 for many in against_recompute)


def test_migration_is_what_a_shared_array_is_for() -> None:
    limits = [sharing(migrate=share).duty_by_mean_with_moves for share in (0.0, 0.02, 0.1, 0.3)]
    assert limits[0] == pytest.approx(sharing().duty_by_mean)
    assert limits == sorted(limits)
    assert limits[1:] == pytest.approx([0.125, 0.332, 0.849], abs=0.005)


def test_the_simulator_agrees_with_the_rule_at_both_ends() -> None:
    spec = parse_plan(RULE.read_text().replace("requests = 20000", "requests = 4000"))
    costs = costs_of(spec, load_model(spec.model), 30_208)
    load = SyntheticLoad(spec, costs)
    _, local, array = candidates_of(spec)
    below, above = 0.4, 0.8
    times = {(c.name, at): assess(spec, costs, load, c, at).cell for c in (local, array) for at in (below, above)}
    assert times["array", below].restoring_share < 0.07 < times["array", above].restoring_share
    assert times["array", below].ttft_s.p50 < times["local", below].ttft_s.p50
    assert times["array", above].ttft_s.p50 > times["local", above].ttft_s.p50
