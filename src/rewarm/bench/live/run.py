"""Runs a job against live servers: fill their caches, make them forget, ask, and judge what came back.

Servers are interleaved as targets of storage are: every concurrency on server after server, and the whole round is
repeated. Beside every cell the same load is run with prompts that the server has never seen: recompute, measured.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec

from rewarm.bench.host import host_facts, package_version
from rewarm.bench.live.client import Client
from rewarm.bench.live.endpoint import Endpoint, find, wait_ready
from rewarm.bench.live.figures import cell_of, measured_recompute, with_live
from rewarm.bench.live.forcing import Forcing, choose, make_cold, push
from rewarm.bench.live.load import LoadReading, run_cell
from rewarm.bench.live.prompts import FRESH, text
from rewarm.bench.result import SCHEMA, Cell, Recompute, Result
from rewarm.bench.stages import Stages
from rewarm.bench.summary import differences, summarise, verdicts
from rewarm.workload import shapes
from rewarm.workload.job import Job

_SUFFIX = 4 * FRESH
"""Texts of new tokens have numbers from here on."""


@dataclass
class _Run:
    """What the parts of one run share."""

    job: Job
    stages: Stages
    tell: Callable[[str], None]
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    forcings: dict[str, Forcing] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(FRESH))

    def fresh(self) -> int:
        """The number of a prompt that no server has seen in this run."""
        return next(self._numbers)


def run_live(job: Job, stages: Stages, tell: Callable[[str], None], *, api_key: str | None = None) -> Result:
    """Run a job with servers; `tell` hears what is ended when it is interrupted. Stages count requests.

    Raises `ConfigError` for what cannot be run, `StorageError` when a server does not come up or cannot be filled.
    Requests that fail in a cell do not raise: they are in `Result.failures`.
    """
    try:
        return asyncio.run(_run(_Run(job, stages, tell), api_key))
    except KeyboardInterrupt:
        tell(f"ended the requests under way and closed all connections; {', '.join(job.servers)} keep what they stored")
        raise


async def _run(run: _Run, api_key: str | None) -> Result:
    job = run.job
    async with AsyncExitStack() as stack:
        for name, server in job.servers.items():
            client = await stack.enter_async_context(Client(server, job.timeout_s, api_key))
            run.endpoints[name] = await find(name, server, client, job.seed)
            run.forcings[name] = await choose(run.endpoints[name])
            run.notes += _notes(run, name)
        for name in job.servers if job.populate else ():
            await _populate(run, name)
        for repeat in range(job.repeats):
            for concurrency in job.concurrency:
                for name in job.servers:
                    await _measure(run, name, concurrency, repeat)
    return _result(run)


def _notes(run: _Run, name: str) -> list[str]:
    endpoint = run.endpoints[name]
    if endpoint.tokenizer.measured:
        return [f"{name}: serves {endpoint.model}, {endpoint.tokenizer.per_word:.2f} tokens a word"]
    return [f"{name}: serves {endpoint.model} and reports no tokens: a word is taken for one, a piece of text for one"]


async def _populate(run: _Run, name: str) -> None:
    """Let a server compute, and so store, the prefix of every session."""
    job, endpoint = run.job, run.endpoints[name]
    words = endpoint.tokenizer.words(job.tokens)

    def maker(session: int) -> Callable[[], bytes]:
        return lambda: endpoint.request(text(job.seed, session, words), 1)

    with run.stages(f"filling {name}", job.session_count) as progress:
        makers = [maker(session) for session in range(job.session_count)]
        await push(endpoint, makers, "could not be stored", progress.advance)
    await wait_ready(endpoint)  # one request more: an engine may begin to store a prefix with its next step only


async def _measure(run: _Run, name: str, concurrency: int, repeat: int) -> None:
    """One cell of one server: made cold, asked, and asked again with prompts that it never saw."""
    job, endpoint, forcing = run.job, run.endpoints[name], run.forcings[name]
    asks = shapes.schedule(job, concurrency)
    label = f"repeat {repeat + 1} of {job.repeats}: {concurrency} ({job.shape}) on {name}"
    if steps := forcing.steps(job.tokens):
        with run.stages(f"{label}: making it forget ({forcing.how})", steps) as progress:
            await make_cold(endpoint, forcing, job.tokens, run.fresh, job.seed, run.tell, progress.advance)
    with run.stages(label, job.requests(concurrency)) as progress:
        reading = await _ask(run, endpoint, asks, {}, progress.advance)
    recompute: Recompute | None = None
    if job.recompute:
        unseen = {ask.session: run.fresh() for client in asks for ask in client}
        with run.stages(f"{label}: recompute", job.requests(concurrency)) as progress:
            recompute = measured_recompute(await _ask(run, endpoint, asks, unseen, progress.advance))
        if recompute is None:
            run.notes.append(f"{name} at {concurrency}, repeat {repeat + 1}: recompute failed, so nothing is beside it")
    cell = cell_of(
        reading, target=name, concurrency=concurrency, repeat=repeat, reason=forcing.reason, recompute=recompute
    )
    run.cells.append(cell)


async def _ask(
    run: _Run,
    endpoint: Endpoint,
    asks: Sequence[shapes.Client],
    numbers: dict[int, int],
    advance: Callable[[float], None],
) -> LoadReading:
    """Prepare the requests of a cell and run it; `numbers` gives sessions another text than their own."""
    job = run.job
    requests = {}
    for ask in itertools.chain.from_iterable(asks):
        prompt = text(job.seed, numbers.get(ask.session, ask.session), endpoint.tokenizer.words(ask.tokens))
        if job.new_tokens:
            suffix = text(job.seed, _SUFFIX + run.fresh(), endpoint.tokenizer.words(job.new_tokens, start=False))
            prompt = f"{prompt} {suffix}"
        requests[ask.session] = endpoint.request(prompt, job.output_tokens)

    def fresh(number: int) -> bytes:
        return endpoint.request(text(job.seed, run.fresh(), endpoint.tokenizer.words(job.tokens)), 1)

    return await run_cell(endpoint.client, asks, requests, advance, fresh, job.fresh_requests_per_s)


def _result(run: _Run) -> Result:
    job = run.job
    summary = with_live(summarise(run.cells), run.cells)
    for row in summary:
        limits = row.live.client_limits if row.live else []
        if limits:
            run.notes.append(f"{row.target} at {row.concurrency}: these numbers are the client's: {'; '.join(limits)}")
    return Result(
        schema=SCHEMA,
        version=package_version(),
        host=host_facts(),
        seed=job.seed,
        job=msgspec.to_builtins(job),
        sizes={"restored_tokens": job.tokens, "sessions": job.session_count},
        media={},
        ceiling=[],
        cells=run.cells,
        summary=summary,
        differences=differences(summary),
        verdicts=verdicts(summary),
        notes=run.notes,
    )
