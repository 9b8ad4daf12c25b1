"""From cells to medians and sentences: what is claimed, what is noise, what is a failure."""

from __future__ import annotations

from typing import Any

import pytest

from rewarm.bench.recompute import Prefiller, percentiles
from rewarm.bench.result import Cell, CellBytes, Percentiles, Recompute
from rewarm.bench.summary import differences, summarise, verdicts
from rewarm.errors import ConfigError
from rewarm.geometry.presets import load_model
from rewarm.workload.job import make_job


def recompute(p50: float) -> Recompute:
    return Recompute(
        ttft_s=Percentiles(p50, p50, p50), tokens_per_s=1, break_even_bytes_per_s=2e9, gpu="H100", gpus=2, mfu=0.5,
        source="modelled",
    )  # fmt: skip


def cell(target: str, p50: float | None, repeat: int = 0, **changes: Any) -> Cell:
    values: dict[str, Any] = {
        "target": target, "emulated": False, "concurrency": 8, "repeat": repeat, "ttft_s": Percentiles(p50, p50, p50),
        "modelled_s": 0.0, "seconds": p50 or 0.0, "restored_tokens_per_s": 10.0, "read_bytes_per_s": 1e9,
        "ceiling_share": 0.9, "cpu_s_per_gb": 0.1, "client_cpu_share": 0.0, "hits": 1, "misses": 0, "miss_causes": {},
        "wrong_blocks": 0, "compared": "every byte", "cold": "proven", "cold_reason": "", "device": "uring",
        "bytes": CellBytes(payload=1, padding=0, log=0, kernel=1, device=1), "recompute": recompute(4.0),
        "requests": [],
    }  # fmt: skip
    return Cell(**{**values, **changes})


def cells(target: str, readings: list[float], **changes: Any) -> list[Cell]:
    return [cell(target, p50, repeat, **changes) for repeat, p50 in enumerate(readings)]


def test_medians_and_spread() -> None:
    (summary,) = summarise(cells("a", [3.0, 1.0, 2.0]))
    assert summary.ttft_s == Percentiles(2.0, 2.0, 2.0)
    assert summary.spread == pytest.approx((3.0 - 1.0) / 2.0)
    assert summary.repeats == 3


def test_a_failure_does_not_average_away_and_the_worst_verdict_counts() -> None:
    found = summarise([cell("a", 1.0), cell("a", None, 1, misses=2, cold="failed"), cell("a", 1.0, 2)])[0]
    assert found.ttft_s == Percentiles(None, None, None)
    assert (found.spread, found.misses, found.cold) == (None, 2, "failed")
    assert "no figure, requests failed" in verdicts([found])[0]


def test_one_reading_has_no_spread_and_nothing_is_claimed() -> None:
    lines = verdicts(summarise([cell("a", 2.0), cell("b", 1.0)]))
    assert lines[-1] == "b against a at concurrency 8: 2.00x, from one repeat: without a spread nothing is claimed"


@pytest.mark.parametrize(
    ("other", "claim"),
    [
        ([1.9, 2.0, 2.1], "no difference beyond noise (1.00x, spread of the repeats 10%)"),
        ([1.85, 1.9, 1.95], "no difference beyond noise (1.05x, spread of the repeats 10%)"),
        ([0.98, 1.0, 1.02], "median time to first token 2.00x as short (spread of the repeats 10%)"),
        ([3.9, 4.0, 4.1], "median time to first token 0.50x as short (spread of the repeats 10%)"),
    ],
)
def test_a_difference_inside_the_spread_is_noise(other: list[float], claim: str) -> None:
    lines = verdicts(summarise([*cells("a", [1.9, 2.0, 2.1]), *cells("b", other)]))
    assert lines[-1] == f"b against a at concurrency 8: {claim}"


def test_measured_media_are_compared_with_recompute_and_emulated_ones_among_themselves() -> None:
    groups = [
        *cells("flash", [1.0, 1.0]),
        *cells("x", [2.0, 2.0], emulated=True),
        *cells("y", [1.0] * 2, emulated=True),
    ]
    lines = verdicts(summarise(groups))
    assert len(lines) == 2
    assert "flash: against recompute on 2 x H100 (modelled at 50% of peak)" in lines[0]
    assert "at 8 1.00 s against 4.00 s, 4.0x faster" in lines[0]
    assert lines[1].startswith("y against x at concurrency 8 (both emulated): median time to first token 2.00x")


@pytest.mark.parametrize(("cold", "said"), [("proven", False), ("not_provable", True), ("failed", True)])
def test_a_verdict_on_reads_that_may_be_warm_says_so(cold: str, said: bool) -> None:
    line = verdicts(summarise(cells("a", [8.0, 8.0], cold=cold)))[0]
    assert "2.0x slower" in line
    assert ("not proven to be cold" in line) == said


def test_percentiles_are_nearest_rank_and_what_never_came_is_null() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0]) == Percentiles(2.0, 4.0, 4.0)
    assert percentiles([float(n) for n in range(1, 101)]) == Percentiles(50.0, 90.0, 99.0)
    assert percentiles([1.0, 2.0, float("inf")]) == Percentiles(2.0, None, None)


def test_recompute_runs_one_request_after_another() -> None:
    """1,024 tokens of Llama-3.1-8B on one H100: (2 x 8.03e9 x 1024 + 4 x 32 x 32 x 128 x 1024^2/2) / (989e12 x 0.5)."""
    job = make_job({"model": "Llama-3.1-8B", "tokens": 1024, "targets": {"a": "memory:"}}, "test")
    found = Prefiller.of(load_model(job.model), job).wave(4, 1024, 0, 1024 * 131072)
    each = (2 * 8_030_261_248 * 1024 + 4 * 32 * 32 * 128 * 1024**2 / 2) / (989e12 * 0.5)
    assert found is not None
    assert found.ttft_s.p50 == pytest.approx(2 * each)
    assert found.ttft_s.p99 == pytest.approx(4 * each)
    assert found.tokens_per_s == pytest.approx(1024 / each)
    assert found.break_even_bytes_per_s == pytest.approx(1024 * 131072 / each)
    assert (found.gpu, found.gpus, found.source) == ("H100", 1, "modelled")


def test_gpus_follow_the_ranks_and_an_unknown_one_is_named() -> None:
    job = make_job(
        {"model": "Llama-3.1-8B", "tokens": 1024, "tp": 4, "targets": {"a": "memory:"}, "gpu": "H101"}, "test"
    )
    with pytest.raises(ConfigError, match="did you mean 'H100'"):
        Prefiller.of(load_model(job.model), job)
    job = make_job({"model": "Llama-3.1-8B", "tokens": 1024, "tp": 4, "targets": {"a": "memory:"}}, "test")
    assert Prefiller.of(load_model(job.model), job).gpus == 4


def test_differences_have_their_noise_and_stay_within_their_kind() -> None:
    found = differences(
        summarise(
            [
                *cells("a", [2.0, 2.0, 2.2]),
                *cells("b", [1.0, 1.0, 1.1]),
                *cells("c", [1.0, 1.0], emulated=True, recompute=None),
            ]
        )
    )
    assert [(d.target, d.against, d.emulated) for d in found] == [
        ("a", "recompute", False),
        ("b", "recompute", False),
        ("b", "a", False),
    ]
    assert [d.ratio for d in found] == pytest.approx([2.0, 4.0, 2.0])
    assert all(d.claimed for d in found)


def test_a_difference_without_noise_or_figure_is_not_claimed() -> None:
    single = differences(summarise([cell("a", 1.0)]))[0]
    failed = differences(summarise([cell("a", None), cell("a", None, 1)]))[0]
    within = differences(summarise([*cells("a", [4.0, 2.0, 6.0])]))[0]
    assert (single.noise, single.claimed) == (None, False)
    assert (failed.ratio, failed.claimed) == (None, False)
    assert (within.ratio, within.claimed) == (1.0, False)
