"""One cell of load: clients ask as their schedule says, and the load client watches itself meanwhile.

Every request counts from its intended start. Requests are prepared before the cell, so that the client sends bytes and
keeps times, no more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from rewarm.bench.live.client import Answer, Client
from rewarm.workload import shapes

LEAD_S = 0.05
"""Between making the tasks of a cell and its start: they must all be there."""
WATCH_S = 0.01
"""How often the event loop is asked whether it wakes up in time."""
FRESH_MAX = 64
"""Disturbing prompts under way at once; a server that does not keep up with more is disturbed enough."""


@dataclass(frozen=True)
class LoadReading:
    """What a cell measured. `start` is monotonic; `lags_s` how late the event loop woke up, each time it was asked."""

    answers: list[Answer]
    start: float
    seconds: float
    cpu_s: float
    lags_s: list[float]


async def run_cell(
    client: Client,
    asks: Sequence[shapes.Client],
    requests: Mapping[int, bytes],
    advance: Callable[[float], None],
    fresh: Callable[[int], bytes] | None = None,
    fresh_per_s: float = 0.0,
) -> LoadReading:
    """Run the schedule `asks` with a prepared request for each session; `advance` hears of every answer.

    With `fresh_per_s` prompts made by `fresh` arrive beside it as a Poisson stream; their answers do not count.
    """
    await client.open_connections(len(asks))
    before = time.process_time()
    start = time.monotonic() + LEAD_S
    async with _watched() as lags, _disturbed(client, fresh, fresh_per_s):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one_client(client, each, requests, start, advance)) for each in asks]
        ended = time.monotonic()
    answers = sorted((answer for task in tasks for answer in task.result()), key=lambda answer: answer.session)
    return LoadReading(answers, start, ended - start, time.process_time() - before, lags)


async def _one_client(
    client: Client, asks: shapes.Client, requests: Mapping[int, bytes], start: float, advance: Callable[[float], None]
) -> list[Answer]:
    answers: list[Answer] = []
    for ask in asks:
        intended = (answers[-1].end or start if answers else start) + ask.delay_s
        await asyncio.sleep(intended - time.monotonic())
        answers.append(await client.ask(ask.session, requests[ask.session], intended))
        advance(1)
    return answers


@asynccontextmanager
async def _watched() -> AsyncIterator[list[float]]:
    """Keep how late the event loop wakes up while the block runs."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            due = time.monotonic() + WATCH_S
            await asyncio.sleep(WATCH_S)
            lags.append(max(0.0, time.monotonic() - due))

    async with _beside(watch()):
        yield lags


@asynccontextmanager
async def _disturbed(client: Client, fresh: Callable[[int], bytes] | None, per_s: float) -> AsyncIterator[None]:
    """Send prompts of `fresh` beside the block."""
    if fresh is None or not per_s:
        yield
        return
    make = fresh

    async def disturb() -> None:
        running: set[asyncio.Task[Answer]] = set()
        waits = np.random.default_rng(0)
        number = 0
        try:
            while True:
                await asyncio.sleep(waits.exponential(1 / per_s))
                running = {task for task in running if not task.done()}
                if len(running) < FRESH_MAX:
                    running.add(asyncio.create_task(client.ask(-1, make(number), time.monotonic())))
                    number += 1
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async with _beside(disturb()):
        yield


@asynccontextmanager
async def _beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine beside the block, and end it with the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
