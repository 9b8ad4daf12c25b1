"""Comparing results: what is paired, what is claimed, what is refused, and how the command answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from click.testing import Result as Invocation

from rewarm.bench.compare import SCHEMA, Comparison, compare
from rewarm.bench.paired import effect_of
from rewarm.bench.recompute import percentiles
from rewarm.bench.result import Cell, CellBytes, Request, Result
from rewarm.bench.summary import summarise
from rewarm.cli import exits, main
from rewarm.errors import ConfigError

JOB = {"model": "Llama-3.1-8B", "tokens": 512, "block_tokens": 16, "kv_dtype": None, "tp": 1, "new_tokens": 0}


def cell(target: str, concurrency: int, repeat: int, times: list[float | None], cold: str = "proven") -> Cell:
    bad = any(time is None for time in times)
    return Cell(
        target=target,
        emulated=False,
        concurrency=concurrency,
        repeat=repeat,
        ttft_s=percentiles([math.inf if time is None else time for time in times]),
        modelled_s=0.0,
        seconds=1.0,
        restored_tokens_per_s=1e4,
        read_bytes_per_s=1e9,
        ceiling_share=None,
        cpu_s_per_gb=None,
        client_cpu_share=0.1,
        hits=10,
        misses=int(bad),
        miss_causes={"missing": 1} if bad else {},
        wrong_blocks=0,
        compared="every byte",
        cold=cold,
        cold_reason="",
        bytes=CellBytes(payload=1, padding=0, log=0, kernel=1, device=1),
        device="uring",
        recompute=None,
        requests=[Request(session=k, ttft_s=time, hits=1, misses=0) for k, time in enumerate(times)],
    )


def result(cells: list[Cell], **job: Any) -> Result:
    return Result(
        schema=1,
        version="1",
        host={"node": "here"},
        seed=0,
        job={**JOB, **job},
        sizes={},
        media={},
        ceiling=[],
        cells=cells,
        summary=summarise(cells),
        verdicts=[],
        notes=[],
    )


def waves(
    scale: float = 1.0, *, target: str = "disk", repeats: int = 3, random: np.random.Generator, repeat_sd: float = 0.01
) -> Result:
    """Waves served one after another, on a medium that is a little faster or slower in every repeat."""
    cells = []
    for repeat in range(repeats):
        drift = scale * math.exp(random.normal(0, repeat_sd))
        for size in (8, 16):
            jitter = np.exp(random.normal(0, 0.02, size))
            cells.append(cell(target, size, repeat, (np.arange(1, size + 1) * 0.1 * drift * jitter).tolist()))
    return result(cells)


def against(a: Result, b: Result) -> Comparison:
    return compare(("a.json", a), ("b.json", b))


@pytest.mark.parametrize(("repeats", "repeat_sd"), [(3, 0.01), (5, 0.02), (10, 0.04)])
def test_a_target_is_no_different_from_itself_and_a_fifth_is_told_apart(repeats: int, repeat_sd: float) -> None:
    """Each in at least 19 of 20 runs, here of 100, whatever the noise of a run is."""
    random = np.random.default_rng(7)
    made = {"repeats": repeats, "random": random, "repeat_sd": repeat_sd}
    same = [against(waves(**made), waves(**made)).pairs[0].verdict for _ in range(100)]
    slower = [against(waves(**made), waves(1.2, **made)).pairs[0].verdict for _ in range(100)]
    assert sum(verdict.startswith("no difference") for verdict in same) >= 95
    assert sum("is slower than" in verdict for verdict in slower) >= 95


def test_pairs_follow_the_session_not_the_place() -> None:
    times: list[float | None] = [0.1, 0.4]
    a = [cell("disk", 2, repeat, times) for repeat in range(3)]
    b = [msgspec.structs.replace(c, requests=c.requests[::-1]) for c in a]
    found = against(result(a), result(b)).pairs[0]
    assert found.ttft is not None
    assert (found.ttft.ratio, found.ttft.low, found.ttft.high) == (1.0, 1.0, 1.0)
    assert found.ttft.pairs == 6
    assert found.rows[0].a.ttft_histogram == found.rows[0].b.ttft_histogram
    assert sum(count for _, count in found.rows[0].a.ttft_histogram) == 6


def test_one_repeat_claims_nothing_and_a_failed_request_has_no_verdict() -> None:
    one = against(result([cell("disk", 1, 0, [1.0])]), result([cell("disk", 1, 0, [2.0])])).pairs[0]
    assert one.verdict.startswith("no verdict: disk of b.json takes 2.000 times as long")
    failed = [cell("disk", 2, repeat, [1.0, None if repeat == 1 else 2.0]) for repeat in range(3)]
    found = against(result(failed), result(failed))
    assert found.pairs[0].verdict.startswith("no verdict: requests failed")
    assert any("blocks missed" in note for note in found.notes)


def test_a_small_but_steady_difference_is_noise_and_a_drift_widens_the_interval() -> None:
    small = effect_of(([[1.0]] * 5, [[1.015]] * 5))
    assert small.low == pytest.approx(1.015)
    assert not small.claimed
    drifting = effect_of(([[1.0]] * 3, [[1.0], [1.2], [1.5]]))
    assert drifting.low is not None
    assert drifting.low < 1 < drifting.ratio
    assert not drifting.claimed


def test_a_repeat_in_which_the_machine_did_something_else_does_not_decide_of_ten() -> None:
    steady = [[1.0 + 0.005 * (k % 3)] for k in range(10)]
    slower = [[1.2 * time for time in repeat] for repeat in steady]
    found = effect_of((steady, [[5.0], *slower[1:]]))
    assert found.claimed
    assert found.ratio == pytest.approx(1.2, rel=0.01)
    assert not effect_of((steady, [[5.0], *steady[1:]])).claimed


def test_different_work_and_unknown_targets_are_refused() -> None:
    random = np.random.default_rng(1)
    a, b = waves(random=random), waves(random=random, target="array")
    with pytest.raises(ConfigError, match="did not ask for the same: tokens is 512 in one and 1024"):
        against(a, msgspec.structs.replace(b, job={**JOB, "tokens": 1024}))
    assert against(a, b).pairs[0].b.target == "array"
    both = result([*a.cells, *b.cells])
    other = result([msgspec.structs.replace(c, target="nfs") for c in a.cells])
    with pytest.raises(ConfigError, match=r"say which two to compare"):
        against(both, other)
    with pytest.raises(ConfigError, match=r"has no target 'tape'; one of disk, array"):
        compare(("a.json", both), ("a.json", both), ("tape", None))
    with pytest.raises(ConfigError, match="no wave and repeat in common"):
        against(a, result([cell("disk", 3, 0, [1.0] * 3)]))


def run(*arguments: str) -> Invocation:
    return CliRunner().invoke(main, ["compare", *arguments])


def test_the_command_answers_in_json_and_markdown_and_objectives_decide_the_exit_code(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, scale in zip(paths, (1.0, 1.3), strict=True):
        path.write_bytes(msgspec.json.encode(waves(scale, random=random)))
    names, out = [str(path) for path in paths], tmp_path / "compared.json"
    shown = run(*names, "--json", "-o", str(out), "--objective", "ttft_p90 <= 10 s")
    assert shown.exit_code == exits.OK, shown.stderr
    written = json.loads(out.read_text())
    assert written == json.loads(shown.stdout)
    assert written["schema"] == SCHEMA
    documented = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "bench.md").read_text()
    pair = written["pairs"][0]
    fields = {*written, *pair, *pair["a"], *pair["rows"][0], *pair["rows"][0]["a"], *pair["ttft"]}
    assert [name for name in sorted(fields) if f"`{name}`" not in documented] == []
    missed = run(*names, "--markdown", "--objective", "ttft_p90 <= 1.7 s")
    assert missed.exit_code == exits.FINDINGS
    assert missed.stdout.startswith("|  | at once | TTFT p50 |")
    assert "**disk of" in missed.stdout
    assert "error: objective ttft_p90 <= 1.70 s missed: disk of" in missed.stderr
    assert run(*names, "--objective", "ttft_p80 <= 1 s").exit_code == exits.USAGE


def test_a_result_that_was_not_cold_ends_with_findings(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    warm = result([cell("disk", 1, repeat, [1.0], cold="failed") for repeat in range(2)])
    path.write_bytes(msgspec.json.encode(warm))
    shown = run(str(path), str(path))
    assert shown.exit_code == exits.FINDINGS
    assert "not cold" in shown.stderr
    assert "Traceback" not in run(str(path), str(tmp_path / "none.json")).stderr
