"""Every job of `examples/jobs` is run, with its own shape, objective and servers, on less: small prompts, a directory
here instead of its media, a scripted server instead of its servers."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.bench.live.scripted import Scripted

from rewarm.bench.live.run import run_live
from rewarm.bench.replay import run_job
from rewarm.workload.job import make_job

pytestmark = pytest.mark.scale

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "jobs").glob("*.toml"))
SMALL = {"concurrency": [2], "repeats": 1}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path, stage: Any) -> None:
    table = {**tomllib.loads(path.read_text()), **SMALL}
    if "think_s" in table:
        table |= {"think_s": 0.05, "rounds": 2}
    if "trace" in table:
        lines = [{"timestamp": 50 * n, "input_length": 512, "output_length": 1, "hash_ids": [n]} for n in range(2)]
        (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        table["trace"] = str(tmp_path / "trace.jsonl")
    if "requests_per_s" in table:
        table["requests_per_s"] = 20.0
    if "servers" in table:
        with Scripted(tier=True) as server:
            changed = {"url": server.url, "restart": server.forget_command(), "cache_tokens": 500}
            servers = {
                name: given | {key: changed[key] for key in changed if key in given}
                for name, given in table["servers"].items()
            }
            small = {"tokens": 60, "new_tokens": 10, "output_tokens": 4, "servers": servers}
            result = run_live(make_job({**table, **small}, path.name), stage, lambda line: None)
    else:
        targets = {
            name: ({**given, "url": f"file://{tmp_path}"} if isinstance(given, dict) else f"file://{tmp_path}")
            for name, given in table["targets"].items()
        }
        small = {"tokens": 64, "block_tokens": 16, "targets": targets}
        result = run_job(make_job({**table, **small}, path.name), stage, lambda line: None)
    assert [line for line in result.failures if "not cold" not in line] == []
    assert {cell.target for cell in result.cells} == set(table.get("servers", table.get("targets", {})))


def test_there_is_an_example_of_every_shape() -> None:
    shapes = {tomllib.loads(path.read_text()).get("shape", "wave") for path in EXAMPLES}
    assert shapes == {"wave", "closed", "open", "trace"}
