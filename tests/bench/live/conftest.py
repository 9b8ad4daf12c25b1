"""The scripted server, and stages that nobody looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.bench.live.scripted import Scripted

from rewarm.bench.live.run import run_live
from rewarm.bench.result import Result
from rewarm.workload.job import make_job


@pytest.fixture(scope="module")
def shared() -> Iterator[Scripted]:
    """One process for all tests of a module; `server` gives it to each in its first state."""
    with Scripted() as server:
        yield server


@pytest.fixture
def server(shared: Scripted) -> Scripted:
    shared.reset()
    return shared


@pytest.fixture
def live(stage: Any) -> Callable[..., Result]:
    """Run a small job against servers given by name: a URL, or the table of a job file."""

    def run(servers: dict[str, Any], told: list[str] | None = None, **job: Any) -> Result:
        small = {"tokens": 60, "concurrency": [2], "repeats": 1, "output_tokens": 5, "recompute": False, "timeout_s": 5}
        made = make_job({**small, **job, "servers": servers}, "test")
        return run_live(made, stage, (told if told is not None else []).append)

    return run
