"""Objectives: what is read, what they say of a figure, and what a refusal says."""

from __future__ import annotations

import pytest

from rewarm.errors import ConfigError
from rewarm.workload.objective import parse_objective


@pytest.mark.parametrize(
    ("text", "met", "missed"),
    [
        ("ttft_p90 <= 2 s", 2.0, 2.001),
        ("tpot_p99<50ms", 0.049, 0.05),
        ("e2e_p50 <= 1.5s", 1.5, None),
        ("read_bytes_per_s >= 6GB/s", 6e9, 5.9e9),
        ("restored_tokens_per_s > 1000", 1001, 1000),
        ("output_tokens_per_s > 1000 tokens/s", 1001, 1000),
    ],
)
def test_an_objective_is_met_or_missed(text: str, met: float, missed: float | None) -> None:
    objective = parse_objective(text)
    assert objective.met_by(met)
    assert not objective.met_by(missed)
    assert parse_objective(str(objective)).figure == objective.figure


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft_p90", "for example"),
        ("ttft_p80 <= 2 s", "did you mean"),
        ("speed <= 2 s", "one of ttft_p50"),
        ("ttft_p90 == 2 s", "for example"),
        ("ttft_p90 <= 2 GB/s", "duration"),
        ("restored_tokens_per_s > many", "number of tokens"),
    ],
)
def test_a_wrong_objective_says_what_is_right(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_objective(text)
