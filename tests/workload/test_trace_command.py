"""`rewarm trace` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rewarm.cli import main


def rewarm(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments], prog_name="rewarm")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations of two turns, 512 tokens a block."""
    rows = [(0, [1, 2]), (1000, [11, 12]), (2000, [1, 2, 3]), (9000, [11, 12, 13])]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": 512 * len(ids), "output_length": 100, "hash_ids": ids}) + "\n"
            for t, ids in rows
        )
    )
    return path


def test_json_has_the_documented_keys(trace: Path) -> None:
    result = rewarm(str(trace), "--at", "512,2048,1e6", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    assert answer["requests"] == 4
    assert answer["mean_input_tokens"] == 1280
    assert answer["mean_output_tokens"] == 100
    assert answer["block_tokens"] == 512
    assert answer["infinite_cache"]["block_hit_rate"] == pytest.approx(4 / 10)
    assert answer["infinite_cache"]["token_hit_rate"] == pytest.approx(4 / 10)
    assert [(row["cached_tokens"], row["token_hit_rate"]) for row in answer["lru"]] == [
        (512, 0), (2048, pytest.approx(0.2)), (1e6, pytest.approx(0.4)),
    ]  # fmt: skip
    assert set(answer["reuse_interval_s"]) == {"p10", "p50", "p90", "p99"}
    assert answer["reuse_interval_s"]["p10"] == pytest.approx(2, rel=0.01)
    assert answer["reuse_interval_s"]["p99"] == pytest.approx(8, rel=0.01)


def test_the_table_names_capacities_and_rates(trace: Path) -> None:
    result = rewarm(str(trace))
    assert result.exit_code == 0, result.output
    assert "4 requests in 9.00 s (mooncake)" in result.output
    assert "no limit" in result.output
    assert "40.0%" in result.output


def test_lengths_alone_say_so(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n")
    answer = json.loads(rewarm(str(path), "--json").output)
    assert answer["infinite_cache"] is None
    assert answer["lru"] == []
    assert "lengths and arrivals only" in answer["notes"][0]
    refused = rewarm(str(path), "--sample", "0.5")
    assert refused.exit_code == 2
    assert "nothing to sample" in refused.output


def test_a_sample_shows_its_error(trace: Path) -> None:
    text = trace.read_text()
    trace.write_text("".join(
        json.dumps(json.loads(line) | {"hash_ids": [k * 100 + i for i in json.loads(line)["hash_ids"]],
                                       "timestamp": json.loads(line)["timestamp"] + 10_000 * k}) + "\n"
        for k in range(200) for line in text.splitlines()[: 2 + 2 * (k % 2)]
    ))  # fmt: skip
    answer = json.loads(rewarm(str(trace), "--sample", "0.3", "--at", "1e6", "--json").output)
    assert 0.2 < answer["sampled_share"] < 0.4
    assert answer["requests"] == 600
    assert 0 < answer["infinite_cache"]["token_hit_rate_error"] < 0.2
    assert answer["infinite_cache"]["token_hit_rate"] == pytest.approx(4 * 100 / (100 * 4 + 100 * 10), abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "1e6,x"], "cannot read 'x' as a number of tokens"),
        (["--at", "-5"], "capacities are positive"),
        (["--sample", "2"], "sample_rate is 2.0"),
    ],
)
def test_bad_options_are_usage_errors(trace: Path, arguments: list[str], message: str) -> None:
    result = rewarm(str(trace), *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    result = rewarm(str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2
    assert "none.jsonl" in result.output
