"""`rewarm record` in a real engine: the trace it writes while it serves is what the requests asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.engines import BLOCK_TOKENS, Engine, prompt, rewarm_kv, whole_blocks

pytestmark = pytest.mark.engine

SHARED_TOKENS = 640


def rewarm(*words: object) -> str:
    """Run a verb as a user would; what it printed."""
    command = [sys.executable, "-m", "rewarm", *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_recorded_engine_gives_a_trace_and_a_job_to_replay(
    new_engine: Callable[[], Engine], model: Path, pool: Path, tmp_path: Path
) -> None:
    shared = prompt(1, SHARED_TOKENS)
    asked = [shared + prompt(2, 300), shared + prompt(3, 200), shared + prompt(2, 300)]
    path = tmp_path / "day.jsonl"
    engine = new_engine().start(model, rewarm_kv(pool, record=str(path)))
    for context in asked:
        engine.generate(context)
    engine.ask("settle")
    engine.ask("stop")

    found = json.loads(rewarm("trace", path, "--json"))
    assert (found["requests"], found["block_tokens"]) == (3, BLOCK_TOKENS)
    assert found["mean_input_tokens"] == sum(map(len, asked)) / 3
    references = sum(whole_blocks(len(context)) for context in asked)
    hits = whole_blocks(SHARED_TOKENS) + whole_blocks(len(asked[2]))
    assert found["infinite_cache"]["block_hit_rate"] == pytest.approx(hits / references)

    job = tmp_path / "job.toml"
    job.write_text(
        f"""
        model = "{model}"
        tokens = 960
        concurrency = [3]
        shape = "trace"
        trace = "{path}"
        repeats = 1
        [targets]
        disk = "file://{tmp_path / "store"}"
        """
    )
    (tmp_path / "store").mkdir()
    rewarm("bench", job, "-o", tmp_path / "result.json")
    (cell,) = json.loads((tmp_path / "result.json").read_text())["cells"]
    assert (cell["concurrency"], cell["misses"]) == (3, 0)
