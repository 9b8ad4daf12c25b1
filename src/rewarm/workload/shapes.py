"""When the requests of a cell start, and which session each asks for: a wave, closed clients, an open stream, a trace.

Pure: from a job to a schedule, the same for stores and for servers. Every request of a cell has a session of its own,
so that nothing it asks for was read by another one before.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rewarm.errors import ConfigError
from rewarm.workload import arrivals
from rewarm.workload.job import Job
from rewarm.workload.reading import open_trace


@dataclass(frozen=True)
class Ask:
    """One request: for the first `tokens` of a session. It starts `delay_s` after the start of the cell, or, when it
    follows another request of the same client, after the end of that one."""

    session: int
    delay_s: float
    tokens: int


Client = tuple[Ask, ...]
"""What one client asks for, one request after another."""


def schedule(job: Job, concurrency: int) -> list[Client]:
    """The clients of a cell of this concurrency. Raises `ConfigError` for a trace that has too few requests."""
    if job.shape == "closed":
        return [
            tuple(
                Ask(session=turn * concurrency + client, delay_s=job.think_s if turn else 0.0, tokens=job.tokens)
                for turn in range(job.rounds)
            )
            for client in range(concurrency)
        ]
    if job.shape == "trace":
        return _of_trace(job, concurrency)
    if job.shape == "open":
        assert job.requests_per_s is not None  # the job was checked
        starts = arrivals.poisson(job.requests_per_s, concurrency, job.seed)
    else:
        starts = arrivals.wave(concurrency)
    return [(Ask(session, float(start), job.tokens),) for session, start in enumerate(starts)]


def _of_trace(job: Job, count: int) -> list[Client]:
    """The first requests of a trace at its times; what is shorter than a block restores one block."""
    assert job.trace is not None  # the job was checked
    asks: list[Client] = []
    for batch in open_trace(job.trace).batches():
        for arrival_s, tokens in itertools.islice(zip(batch.arrival_s, batch.input_tokens, strict=True), count):
            wanted = min(max(int(tokens), job.block_tokens), job.tokens)
            asks.append((Ask(len(asks), float(arrival_s), wanted),))
            if len(asks) == count:
                return asks
    raise ConfigError(f"{job.trace}: the trace has {len(asks)} requests, and a concurrency asks for the first {count}")
