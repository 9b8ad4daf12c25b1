"""The arithmetic of the duel with the peers (benchmarks/peers/table.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def table() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "peers" / "table.py"
    spec = importlib.util.spec_from_file_location("duel_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _pass(table: ModuleType, seconds: float, size: int, cpu_s: float, latencies_s: tuple[float, ...]) -> object:
    return table.Pass(seconds, cpu_s, size, size + size // 10, size, latencies_s)


def test_nearest_rank_percentiles(table: ModuleType) -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [table.percentile(values, share) for share in (0.01, 0.2, 0.21, 0.5, 0.99, 1.0)] == [1, 1, 2, 3, 5, 5]
    assert table.percentile([7.0], 0.99) == 7.0


def test_a_rounds_rate_is_its_bytes_by_its_seconds(table: ModuleType) -> None:
    fast = _pass(table, 1.0, 4_000_000_000, 0.4, (0.5, 1.0))
    slow = _pass(table, 3.0, 4_000_000_000, 0.8, (3.0,))
    row = table.summarise([[fast, slow], [fast], [slow]])
    assert row.rates == (2e9, 4e9, pytest.approx(4e9 / 3))
    assert row.cpu_s_per_gb == pytest.approx(0.15)  # of 0.15, 0.1 and 0.2
    assert (row.p50_s, row.p99_s) == (1.0, 3.0)
    assert row.kernel_share == pytest.approx(1.1)
    assert row.verified_share == 1.0


def test_ratios_are_paired_within_a_round(table: ModuleType) -> None:
    assert table.ratio([1.0, 8.0, 3.0], [2.0, 4.0, 3.0]) == 1.0
    assert table.ratio([1.0, 8.0], [2.0]) == 0.5  # rounds that only one of them ran are left out


def test_a_line_shows_the_row_or_why_there_is_none(table: ModuleType) -> None:
    row = table.summarise([[_pass(table, 1.0, 2_000_000_000, 0.1, (0.25, 0.5))]])
    shown = table.line("peer", row, row)
    assert shown == "| peer | 2.00 (2.00 .. 2.00) | 1.00 | 0.050 | 250.0 / 500.0 | 110.0% | 100% |"
    assert table.line("peer", row, None).count("| - |") == 1
    assert "did not run: ImportError" in table.line("peer", "ImportError: x", row)
    assert {len(text.split("|")) for text in (*table.HEADER, shown, table.line("p", "e", None))} == {9}


def test_the_best_of_a_family_has_the_highest_median(table: ModuleType) -> None:
    def row(*rates: float) -> object:
        return table.Row(rates, 0.0, 0.0, 0.0, 1.0, 1.0, 1)

    families = {"c": "C", "a": "ours", "b": "ours", "absent": "theirs"}
    rows = {"a": row(1.0, 9.0, 2.0), "b": row(3.0, 3.0, 3.0), "c": row(5.0)}
    assert table.best_of_families(families, rows) == ["c", "b"]


def test_a_row_stands_against_the_fastest_of_theirs(table: ModuleType) -> None:
    def row(*rates: float) -> object:
        return table.Row(rates, 0.0, 0.0, 0.0, 1.0, 1.0, 1)

    rows = {"a": row(6.0, 4.0), "x": row(2.0, 4.0), "y": row(1.0)}
    assert table.against("a", "peer", ("y", "x", "absent"), rows) == "* Rewarm a reads at 2.00 x the best peer, x"
    assert "no rows" in table.against("a", "peer", ("absent",), rows)
    assert "no rows" in table.against("absent", "peer", ("x",), rows)
