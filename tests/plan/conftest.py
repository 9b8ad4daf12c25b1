"""The conversation trace of the Mooncake project (see data/NOTICE), and plans to start from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data" / "conversation.csv.gz"


@pytest.fixture(scope="session")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace as its publishers wrote it: one JSON line per request."""
    path = tmp_path_factory.mktemp("trace") / "conversation.jsonl"
    now = 0
    with gzip.open(DATA, "rt") as lines, path.open("w") as out:
        for line in lines:
            elapsed, tokens, output, runs = line.rstrip("\n").split(",")
            now += int(elapsed)
            row = {"timestamp": now, "input_length": int(tokens), "output_length": int(output)}
            out.write(json.dumps(row | {"hash_ids": _ids(runs)}) + "\n")
    return path


def _ids(runs: str) -> list[int]:
    found: list[int] = []
    for run in runs.split():
        first, _, more = run.partition("+")
        found += range(int(first), int(first) + int(more or 0) + 1)
    return found


@pytest.fixture
def table() -> Callable[..., dict[str, Any]]:
    """A small plan as a table; `table(fleet={"nodes": 8})` changes fields of its sections."""

    def make(**changes: dict[str, Any]) -> dict[str, Any]:
        base: dict[str, Any] = {
            "model": "Qwen3-Coder-480B-A35B",
            "engine": {"gpus": 8, "prefill_tokens_per_s": 2000, "fixed_time": "1s",
                       "tpot": {"8": "20ms", "32": "30ms"}},
            "medium": [
                {"name": "local", "drive_read": "7GB/s", "capacity": "2TB"},
                {"name": "array", "shared": True, "drives": 4, "drive_read": "7GB/s", "link": "100Gb/s",
                 "capacity": "8TB", "extra_price": 20000},
            ],
            "fleet": {"tp": 8},
            "workload": {"shape": "wave", "concurrency": [8], "context_tokens": 30208},
        }  # fmt: skip
        for section, fields in changes.items():
            if isinstance(base.get(section), dict) and isinstance(fields, dict):
                base[section] = {k: v for k, v in {**base[section], **fields}.items() if v is not None}
            else:
                base[section] = fields
        return base

    return make
