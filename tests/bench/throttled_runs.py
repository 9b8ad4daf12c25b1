"""Runs one small job on three throttled media several times: python throttled_runs.py ONE OTHER SLOWER OUT COUNT.

Writes OUT-0.json, OUT-1.json and so on. Without the ceiling, which a comparison does not need.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from tests.bench.conftest import Stage

from rewarm.bench import replay
from rewarm.bench.replay import run_job
from rewarm.workload.job import make_job


def main(one: str, other: str, slower: str, out: str, count: int) -> None:
    """All runs, one after another."""
    replay.measure_ceiling = lambda *args, **kwargs: []  # type: ignore[assignment]
    directories = {"one": one, "other": other, "slower": slower}
    for number in range(count):
        table = {
            "model": "Llama-3.1-8B", "tokens": 64, "block_tokens": 4, "concurrency": [4], "repeats": 10, "seed": number,
            "targets": {name: {"url": f"file://{path}", "order": "together"} for name, path in directories.items()},
        }  # fmt: skip
        result = run_job(make_job(table, "lab"), Stage(), lambda text: None)
        assert result.failures == []
        Path(f"{out}-{number}.json").write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    main(*sys.argv[1:5], int(sys.argv[5]))
