"""Shapes of load: the schedule that follows from a job, and stores that restore as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rewarm.bench.interference import FILE_BYTES, writing
from rewarm.bench.replay import run_job
from rewarm.bench.result import Result
from rewarm.errors import ConfigError, StorageError
from rewarm.workload.job import make_job
from rewarm.workload.shapes import schedule

JOB: dict[str, Any] = {
    "model": "Llama-3.1-8B", "tokens": 32, "block_tokens": 16, "concurrency": [3], "repeats": 1, "gpu": "L4",
    "targets": {"disk": "memory:"},
}  # fmt: skip


def trace(path: Path, requests: int) -> str:
    """Requests of one block after another, half a second apart: Mooncake's form."""
    lines = [
        {"timestamp": 500 * n, "input_length": 512 * (n + 1), "output_length": 1, "hash_ids": list(range(n + 1))}
        for n in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_wave_starts_at_one_moment() -> None:
    asks = [client[0] for client in schedule(make_job(JOB, "here"), 3)]
    assert [(ask.session, ask.delay_s, ask.tokens) for ask in asks] == [(0, 0.0, 32), (1, 0.0, 32), (2, 0.0, 32)]


def test_closed_clients_ask_one_after_another_for_sessions_of_their_own() -> None:
    job = make_job({**JOB, "shape": "closed", "rounds": 3, "think_s": "500 ms"}, "here")
    clients = schedule(job, 3)
    assert [[ask.session for ask in client] for client in clients] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [[ask.delay_s for ask in client] for client in clients] == [[0.0, 0.5, 0.5]] * 3
    assert job.session_count == 9


def test_an_open_stream_has_its_rate_and_is_the_same_again() -> None:
    job = make_job({**JOB, "shape": "open", "requests_per_s": 20.0, "concurrency": [1000]}, "here")
    starts = [client[0].delay_s for client in schedule(job, 1000)]
    assert starts == sorted(starts) == [client[0].delay_s for client in schedule(job, 1000)]
    assert starts[-1] == pytest.approx(50, rel=0.2)


def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.jsonl", 4)
    job = make_job({**JOB, "shape": "trace", "trace": path, "tokens": 1100, "concurrency": [3]}, "here")
    asks = [client[0] for client in schedule(job, 3)]
    assert [(ask.delay_s, ask.tokens) for ask in asks] == [(0.0, 512), (0.5, 1024), (1.0, 1100)]
    with pytest.raises(ConfigError, match="has 4 requests, and a concurrency asks for the first 5"):
        schedule(job, 5)


@pytest.mark.parametrize(
    "shape",
    [
        {"shape": "closed", "rounds": 2, "think_s": 0.01},
        {"shape": "open", "requests_per_s": 100.0},
        {"shape": "trace"},
    ],
    ids=lambda shape: shape["shape"],
)
def test_a_store_restores_in_every_shape(counted: Path, tmp_path: Path, stage: Any, shape: dict[str, Any]) -> None:
    if shape["shape"] == "trace":
        shape = {**shape, "trace": trace(tmp_path / "trace.jsonl", 3)}
    result = run({**JOB, "tp": 2, "targets": {"disk": f"file://{counted}"}, **shape}, stage)
    (cell,) = result.cells
    count = 6 if shape["shape"] == "closed" else 3
    assert result.failures == []
    assert (cell.concurrency, len(cell.requests), cell.cold) == (3, count, "proven")
    assert cell.recompute is None
    assert max(request.intended_s for request in cell.requests) > 0
    for request in cell.requests:
        assert request.last_byte_s == request.ttft_s
        assert 0 <= (request.submitted_s or 0) < (request.last_byte_s or 0)
    ends = [request.intended_s + (request.last_byte_s or 0) for request in cell.requests]
    assert cell.seconds == pytest.approx(max(ends))
    if shape["shape"] == "closed":
        for first, second in ((0, 3), (1, 4), (2, 5)):
            assert cell.requests[second].intended_s >= ends[first] + 0.01 - 1e-6


def test_writes_beside_the_restores_stay_within_their_file_and_go_away(counted: Path, stage: Any) -> None:
    job = {**JOB, "write_bytes_per_s": "50MB/s", "targets": {"disk": f"file://{counted}"}}
    result = run({**job, "shape": "open", "requests_per_s": 20.0}, stage)
    assert result.failures == []
    assert list(counted.iterdir()) == []


def test_interference_writes_at_its_rate_and_says_when_the_medium_fails(tmp_path: Path) -> None:
    with writing(tmp_path, 40e6) as written:
        while not (tmp_path / "interference").exists() or (tmp_path / "interference").stat().st_size < 5 << 20:
            pass
    assert 0 < written.bytes_per_s < FILE_BYTES
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(StorageError, match="writing beside the restores failed: No such file"),
        writing(tmp_path / "none", 1e6),
    ):
        pass


def run(job: dict[str, Any], stage: Any) -> Result:
    return run_job(make_job(job, "test"), stage, lambda line: None)
