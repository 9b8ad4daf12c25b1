"""`rewarm plan` as a user calls it, with the examples of the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rewarm.cli import main

PLANS = Path(__file__).resolve().parents[2] / "examples" / "plans"

SMALL = """
model = "Llama-3.1-8B"
[engine]
gpu = "H100"
[[medium]]
name = "local"
drive_read = "7GB/s"
capacity = "2TB"
[workload]
shape = "wave"
concurrency = [8]
context_tokens = 30000
"""


def rewarm(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="rewarm")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(SMALL)
    return path


def test_the_published_wave_calibrated(tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    result = rewarm(
        str(PLANS / "published-wave.toml"), "--calibrate", str(PLANS / "published-wave.result.json"), "-o", str(target)
    )
    assert result.exit_code == 0, result.output
    assert "calibrated local: fixed 1.25 s, 6.94 GB/s (the probed peak), restores together" in result.output
    assert "One local drive is enough" in result.output
    answer = json.loads(target.read_text())
    assert answer["schema"] == "rewarm.plan/1"
    assert {row["origin"] for row in answer["inputs"]} == {"measured", "given", "assumed"}
    fitted = {row["name"]: row for row in answer["inputs"]}["medium.local.effective_read"]
    assert fitted["origin"] == "measured"
    assert fitted["source"].endswith("published-wave.result.json")


def test_json_and_inputs(small: Path) -> None:
    answer = json.loads(rewarm(str(small), "--json").output)
    assert answer["verdict"]["sentence"]
    assert answer["cells"][0]["medium"] == "recompute"
    listed = rewarm(str(small), "--inputs").output
    assert "Inputs, assumed" in listed
    assert "prices.gpu_hour" in listed
    assert "SemiAnalysis" in listed


def test_a_missed_objective_ends_with_1(small: Path) -> None:
    small.write_text(SMALL + '[objective]\nttft_p90 = "1us"\n')
    result = rewarm(str(small))
    assert result.exit_code == 1
    assert "nothing keeps to the objective" in result.output
    small.write_text(SMALL + '[objective]\nttft_p90 = "1h"\n')
    assert rewarm(str(small)).exit_code == 0


def test_files_of_a_plan_are_found_beside_it(small: Path) -> None:
    (small.parent / "probe.json").write_text('{"schema": 1, "read_bytes_per_s": 3e9, "write_bytes_per_s": 2e9}')
    small.write_text(SMALL.replace('drive_read = "7GB/s"', 'probe = "probe.json"'))
    answer = json.loads(rewarm(str(small), "--json").output)
    row = {row["name"]: row for row in answer["inputs"]}["medium.local.drive_read"]
    assert (row["value"], row["origin"]) == (3e9, "measured")
    assert row["source"].endswith("probe.json")


def test_a_plan_over_a_trace(small: Path) -> None:
    rows = [
        {"timestamp": 1000 * k, "input_length": 5120 + 512 * (k // 4), "output_length": 20,
         "hash_ids": [100 * (k % 4) + b for b in range(10 + k // 4)]}
        for k in range(40)
    ]  # fmt: skip
    (small.parent / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    head, _, _ = SMALL.partition("[workload]")
    small.write_text(head + '[workload]\nshape = "trace"\ntrace = "t.jsonl"\n')
    result = rewarm(str(small))
    assert result.exit_code == 0, result.output
    assert "Cache for a hit rate" in result.output
    assert "second-sight" in result.output
    (small.parent / "t.jsonl").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n")
    refused = rewarm(str(small))
    assert refused.exit_code == 2
    assert "names no blocks" in refused.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("7GB/s", "0GB/s"), "medium.local.drive_read is 0"),
        (SMALL + "[fleet]\ntp = 7\n", "fleet.tp: tp=7 does not divide"),
        (SMALL.replace("gpu =", "gpuu ="), "did you mean 'gpu'"),
        ("x = [", "is not TOML"),
    ],
)
def test_what_cannot_be_is_a_usage_error(small: Path, text: str, message: str) -> None:
    small.write_text(text)
    result = rewarm(str(small))
    assert result.exit_code == 2
    assert message in result.output


def test_files_that_are_missing_or_of_another_kind(small: Path) -> None:
    assert rewarm("none.toml").exit_code == 2
    assert "a name in .json or .html" in rewarm(str(small), "-o", "plan.txt").output
    missing = rewarm(str(small), "--calibrate", "none.json")
    assert missing.exit_code == 2
    assert "none.json" in missing.output
    (small.parent / "r.json").write_text("{}")
    assert "is not the result of a benchmark" in rewarm(str(small), "--calibrate", str(small.parent / "r.json")).output
