"""The HTTP client: sends one prepared request and keeps the times of what comes back.

One `Client` serves one server over kept connections. Times are of the monotonic clock and taken when bytes reach the
event loop. Every failure of the server or of the network becomes an `Answer` with a cause; only our own defects raise.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from rewarm.bench.live.events import BadStream, Events
from rewarm.workload.job import Server

CONNECT_S = 30.0
"""A server that does not accept a connection in this time is not there."""
_QUOTED = 300
"""Characters of an error page that are kept."""
_READ_BYTES = 1 << 18


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


class Client:
    """Connections to one server, at most `server.connections` at once. Use it inside `async with`.

    `timeout_s` bounds each request, its waiting for a connection included.
    """

    def __init__(self, server: Server, timeout_s: float, api_key: str | None = None) -> None:
        self.url = server.url.rstrip("/")
        self._path = "chat/completions" if server.api == "chat" else "completions"
        self._timeout_s = timeout_s
        self._connections = server.connections or 0  # to aiohttp, 0 is no limit
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(_stamp)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=600.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers=self._headers,
            trace_configs=[trace],
            read_bufsize=_READ_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.close()

    async def get(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of a page. Raises `aiohttp.ClientError` or `TimeoutError`."""
        assert self._session
        async with asyncio.timeout(timeout_s), self._session.get(url) as response:
            return response.status, await response.read()

    async def open_connections(self, count: int) -> None:
        """Open that many connections and keep them, so that a wave does not measure the making of them."""
        wanted = min(count, self._connections or count)
        pages = (self.get(f"{self.url}/models", CONNECT_S) for _ in range(wanted))
        await asyncio.gather(*pages, return_exceptions=True)  # one that fails is opened by its request

    async def ask(self, session: int, body: bytes, intended: float) -> Answer:
        """Send a prepared request and read the whole answer; `intended` is when it should have been sent."""
        assert self._session
        answer = Answer(session, intended)
        url = f"{self.url}/{self._path}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(url, data=body, trace_request_ctx=answer) as response,
            ):
                if response.status != 200:
                    answer.fail(f"HTTP {response.status}", _reason(await response.read()))
                else:
                    await _read(response, answer)
        except TimeoutError:
            answer.fail("timed out", f"no whole answer in {self._timeout_s:g} s")
        except BadStream as error:
            answer.cause, answer.failure = error.cause, str(error)
        except aiohttp.ClientPayloadError as error:
            answer.fail("closed early", str(error))
        except aiohttp.ClientConnectorError as error:
            answer.fail("cannot connect", str(error))
        except (aiohttp.ClientError, OSError) as error:
            answer.fail("connection lost", str(error) or type(error).__name__)
        answer.end = time.monotonic()
        return answer


async def _stamp(session: aiohttp.ClientSession, context: Any, sent: aiohttp.TraceRequestChunkSentParams) -> None:
    """Keep when the last part of the request left."""
    answer = context.trace_request_ctx
    if isinstance(answer, Answer):
        answer.sent = time.monotonic()


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Read a stream to its end. Raises `BadStream` and what the connection raises."""
    events = Events()
    try:
        async for data in response.content.iter_any():
            now = time.monotonic()
            if not events.feed(data):
                continue
            if answer.last is not None:
                answer.gaps.append(now - answer.last)
            answer.first = answer.first or now
            answer.last = now
        events.close()
    finally:
        answer.output_tokens = events.pieces
        if events.usage:
            answer.prompt_tokens = events.usage.prompt_tokens
            answer.cached_tokens = events.usage.cached_tokens
            answer.output_tokens = events.usage.completion_tokens or events.pieces


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
