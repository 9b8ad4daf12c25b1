"""Makes a server forget: by the command that restarts it, or by more prompts than its own cache holds.

Neither proves that a later answer came from flash: the server's memory is out of sight. The result therefore says what
was done, and claims no proof.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rewarm.bench.live.client import Answer
from rewarm.bench.live.endpoint import Endpoint, cache_tokens, wait_ready
from rewarm.bench.live.prompts import text
from rewarm.errors import ConfigError, StorageError

HOOK_S = 900.0
"""How long a restart command may run."""
HOOK_END_S = 5.0
"""How long an interrupted one may take to end by itself."""
OVERFLOW = 1.25
"""Tokens sent for each token of the cache: eviction is not strictly the oldest first."""
PUSH_CONCURRENCY = 8
"""Prompts under way at once while a cache is filled or overflowed."""
_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Forcing:
    """How one server is made cold: `how` is restart, overflow or none; `tokens` is what must be overflowed."""

    how: str
    tokens: int = 0

    def steps(self, tokens: int) -> int:
        """Requests, or restarts, that it takes with prompts of so many tokens."""
        if self.how == "none":
            return 0
        return 1 if self.how == "restart" else math.ceil(self.tokens * OVERFLOW / tokens)

    @property
    def reason(self) -> str:
        """What a result says about it."""
        if self.how == "restart":
            return "the server was restarted before the cell; memory outside of it is out of sight"
        if self.how == "overflow":
            return f"{OVERFLOW * self.tokens:,.0f} tokens of other prompts came before it; other memory is out of sight"
        return "nothing was done to empty the server's cache: the job says cold = none"


async def choose(endpoint: Endpoint) -> Forcing:
    """How to make this server cold. Raises `ConfigError` when nothing is given and its metrics do not say its size."""
    server = endpoint.server
    if server.cold == "none":
        return Forcing("none")
    if server.cold == "restart" or (server.cold is None and server.restart is not None):
        return Forcing("restart")
    tokens = server.cache_tokens or await cache_tokens(endpoint)
    if tokens is None:
        raise ConfigError(
            f"server {endpoint.name!r}: its metrics do not say how large its cache is; give 'restart', a command that "
            "restarts it, or 'cache_tokens', DRAM tiers included, or say cold = \"none\" to measure it as it is"
        )
    return Forcing("overflow", tokens)


async def make_cold(
    endpoint: Endpoint,
    forcing: Forcing,
    tokens: int,
    fresh: Callable[[], int],
    seed: int,
    tell: Callable[[str], None],
    advance: Callable[[float], None],
) -> None:
    """Do it, in `forcing.steps(tokens)` steps. `fresh` numbers prompts of `tokens` that nobody has seen.

    Raises `StorageError` when the server fails.
    """
    if forcing.how == "restart":
        assert endpoint.server.restart is not None
        await run_hook(endpoint.name, endpoint.server.restart, tell)
        await wait_ready(endpoint)
        advance(1)
    elif forcing.how == "overflow":
        words = endpoint.tokenizer.words(tokens)
        makers = [lambda: endpoint.request(text(seed, fresh(), words), 1)] * forcing.steps(tokens)
        await push(endpoint, makers, "could not be sent to overflow the cache", advance)


async def push(
    endpoint: Endpoint, makers: Sequence[Callable[[], bytes]], what: str, advance: Callable[[float], None]
) -> None:
    """Send prompts for their effect, a few at once; each request is made when it is sent.

    Raises `StorageError` when one is not answered: then nobody knows what the server holds.
    """
    answers: list[Answer] = []
    work = iter(enumerate(makers))

    async def one() -> None:
        for number, make in work:
            answers.append(await endpoint.client.ask(number, make(), time.monotonic(), needs_text=False))
            advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(PUSH_CONCURRENCY, len(makers))):
            group.create_task(one())
    failures = Counter(answer.failure for answer in answers if answer.failure)
    if failures:
        causes = "; ".join(f"{count} x {failure}" for failure, count in failures.most_common(3))
        total = failures.total()
        raise StorageError(f"server {endpoint.name!r}: {total} of {len(makers)} prompts {what}: {causes}")


async def run_hook(name: str, command: str, tell: Callable[[str], None], limit_s: float = HOOK_S) -> None:
    """Run a restart command with /bin/sh, in a process group of its own, which is ended when the run is interrupted.

    What it starts in the background goes on. Raises `StorageError` when it fails or takes too long.
    """
    with tempfile.TemporaryFile() as output:  # not a pipe: what it starts may keep it open for ever
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                "/bin/sh", "-c", command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )
        )  # fmt: skip
        try:
            async with asyncio.timeout(limit_s):
                code = await (await asyncio.shield(starting)).wait()
        except TimeoutError:
            code = None
        finally:
            process = await starting  # an interruption that comes while it starts must find its whole group, too
            if process.returncode is None:
                await _end(process)
                tell(f"stopped the restart command of {name} (process group {process.pid})")
        if code != 0:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
            said = " ".join(output.read().decode(errors="replace").split()) or "it printed nothing"
            ended = f"took more than {limit_s:g} s" if code is None else f"ended with {code}"
            raise StorageError(f"server {name!r}: the restart command {ended}: {said}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process group of a command: asked first, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(HOOK_END_S):
                await process.wait()
                return
        except TimeoutError:
            continue
