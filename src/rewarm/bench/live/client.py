"""The load client of one server: prepared requests out over kept connections, answers with their times back.

Every failure of the server or of the network becomes an `Answer` with a cause; only our own defects raise. Times are
of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec

from rewarm.bench.live.connection import Address, CannotConnect, Connection, head
from rewarm.bench.live.events import BadStream, Events
from rewarm.workload.job import Server

_QUOTED = 300
"""Characters of an error page that are kept."""
_OPENING = 64
"""Connections that are opened at once: servers have a short queue of those they have not accepted."""


@dataclass
class Answer:
    """One request and what became of it. Times are monotonic seconds; None: it did not get that far."""

    session: int
    intended: float
    sent: float | None = None
    first: float | None = None
    last: float | None = None
    end: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    cause: str | None = None
    """Why it failed, in a few words; None: answered whole."""
    failure: str | None = None
    gaps: list[float] = field(default_factory=list)
    """Seconds between pieces of text."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def fail(self, cause: str, detail: str) -> None:
        """Book a failure."""
        self.cause, self.failure = cause, f"{cause}: {detail}"


class _Reader:
    """Takes the body of one answer as it comes."""

    def __init__(self, answer: Answer) -> None:
        self.events = Events()
        self.page = bytearray()
        """The body of an answer that is no stream, but an error."""
        self._answer = answer

    def take(self, status: int, body: bytes, now: float) -> None:
        """One piece; raises `BadStream`."""
        if status != 200:
            self.page += body
            return
        answer = self._answer
        if not self.events.feed(body):
            return
        if answer.last is not None:
            answer.gaps.append(now - answer.last)
        answer.first = answer.first or now
        answer.last = now

    def book(self) -> None:
        """What the stream said about tokens, however it ended."""
        answer, usage = self._answer, self.events.usage
        answer.output_tokens = self.events.pieces
        if usage:
            answer.prompt_tokens, answer.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            answer.output_tokens = usage.completion_tokens or self.events.pieces


class Client:
    """Connections to one server, at most `server.connections` at once; whoever comes later waits its turn.

    Use it inside `async with`. `timeout_s` bounds each request, its waiting for a connection included.
    """

    def __init__(self, server: Server, timeout_s: float, api_key: str | None = None) -> None:
        self.url = server.url.rstrip("/")
        self.address = Address.of(self.url)
        self._path = f"{self.address.path}/{'chat/completions' if server.api == 'chat' else 'completions'}"
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._places = asyncio.Semaphore(server.connections) if server.connections else None
        self._most = server.connections
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for connection in self._open:
            connection.close()
        await asyncio.sleep(0)  # the event loop closes what was aborted

    async def get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a page. Raises `OSError` (also `TimeoutError`) or `BadStream`."""
        page = bytearray()
        async with asyncio.timeout(timeout_s), self._connection() as connection:
            request = head("GET", self.address, path, self._headers, 0)
            status = await connection.exchange(request, lambda status, body, now: page.extend(body))
        return status, bytes(page)

    def prepared(self, body: bytes) -> bytes:
        """The whole request that asks for a completion."""
        headers = {"Content-Type": "application/json", **self._headers}
        return head("POST", self.address, self._path, headers, len(body)) + body

    async def open_connections(self, count: int) -> None:
        """Open that many connections and keep them, so that a wave does not measure the making of them."""
        self._idle = [connection for connection in self._idle if connection.usable]
        self._open = set(self._idle)
        wanted = min(count, self._most or count) - len(self._idle)
        for first in range(0, wanted, _OPENING):
            making = (Connection.open(self.address) for _ in range(first, min(wanted, first + _OPENING)))
            for made in await asyncio.gather(*making, return_exceptions=True):
                if isinstance(made, Connection):  # what could not be opened is told by the request that needs it
                    self._idle.append(made)
                    self._open.add(made)

    async def ask(self, session: int, request: bytes, intended: float, *, needs_text: bool = True) -> Answer:
        """Send what `prepared` made and read the whole answer; `intended` is when it should have been sent.

        An answer of a token or two may have no text: the first bytes of a letter have none. `needs_text`: it failed.
        """
        answer = Answer(session, intended)
        reader = _Reader(answer)
        try:
            async with asyncio.timeout(self._timeout_s), self._connection() as connection:
                try:
                    status = await connection.exchange(request, reader.take)
                finally:
                    answer.sent = connection.sent
            if status == 200:
                reader.events.close(needs_text=needs_text)
            else:
                answer.fail(f"HTTP {status}", _reason(bytes(reader.page)))
        except TimeoutError:
            answer.fail("timed out", f"no whole answer in {self._timeout_s:g} s")
        except BadStream as error:
            answer.cause, answer.failure = error.cause, str(error)
        except CannotConnect as error:
            answer.fail("cannot connect", str(error))
        except OSError as error:
            answer.fail("connection lost", str(error) or type(error).__name__)
        reader.book()
        answer.end = time.monotonic()
        return answer

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """An idle connection, or a new one; kept afterwards if another exchange may follow."""
        if self._places:
            await self._places.acquire()
        try:
            self._drop_closed()
            connection = self._idle.pop() if self._idle else await Connection.open(self.address)
            self._open.add(connection)
            try:
                yield connection
            finally:
                self._idle.append(connection)
        finally:
            if self._places:
                self._places.release()

    def _drop_closed(self) -> None:
        """Forget the last connections that the server, or a failed exchange, has closed."""
        while self._idle and not self._idle[-1].usable:
            self._open.discard(self._idle.pop())


class _Problem(msgspec.Struct):
    message: str | None = None
    detail: Any = None
    error: _Problem | str | None = None


def _reason(page: bytes) -> str:
    """What an error page says, in one line."""
    try:
        problem = msgspec.json.decode(page, type=_Problem)
    except msgspec.DecodeError:
        return " ".join(page.decode(errors="replace").split())[:_QUOTED] or "no explanation"
    inner = problem.error
    found = inner if isinstance(inner, str) else inner.message if inner else None
    found = found or problem.message or (str(problem.detail) if problem.detail else None)
    return (found or page.decode(errors="replace"))[:_QUOTED]
