"""One kept HTTP/1.1 connection: bytes out, the body of the answer in, each piece with the moment it came.

Thin on purpose: the moment is taken as the event loop hands over the bytes, before anybody's task has to wake up, and a
prepared request leaves with one write. Parsing is left to httptools. It follows no redirect and knows no proxy.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from rewarm.bench.live.events import BadStream
from rewarm.errors import ConfigError

CONNECT_S = 30.0
"""A server that does not accept a connection in this time is not there."""
PAGE_BYTES_MAX = 64 << 20
"""No page of a server is larger, and no answer of a model."""

Sink = Callable[[int, bytes, float], None]
"""Gets status, a piece of the body, and when it came. What it raises ends the exchange."""


@dataclass(frozen=True)
class Address:
    """Where a server is; `path` is what its URL ends with, without the last slash."""

    host: str
    port: int
    path: str
    secure: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """Split a URL. Raises `ConfigError`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"cannot read the URL {url!r}: {error}") from error
        if not parts.hostname:
            raise ConfigError(f"the URL {url!r} names no host; write http://host:port/v1")
        secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"), secure)


def head(method: str, address: Address, path: str, headers: dict[str, str], length: int) -> bytes:
    """The first bytes of a request; the body follows them."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}:{address.port}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


class CannotConnect(ConnectionError):
    """The server does not accept a connection."""


class Connection(asyncio.Protocol):
    """Serves one exchange at a time; `usable` says whether another may follow."""

    def __init__(self) -> None:
        self.sent: float | None = None
        """When the last byte of the request had left for the kernel; None: not yet."""
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._sink: Sink | None = None
        self._now = 0.0
        self._begin()

    @classmethod
    async def open(cls, address: Address) -> Connection:
        """Connect. Raises `CannotConnect`, after `CONNECT_S` at the latest."""
        context = ssl.create_default_context() if address.secure else None
        making = asyncio.get_running_loop().create_connection(cls, address.host, address.port, ssl=context)
        try:
            async with asyncio.timeout(CONNECT_S):
                _, protocol = await making
        except OSError as error:
            raise CannotConnect(str(error) or f"no connection in {CONNECT_S:g} s") from error
        return protocol

    @property
    def usable(self) -> bool:
        """Whether the connection is open and idle."""
        return self._transport is not None and not self._transport.is_closing() and self._done is None

    def close(self) -> None:
        """Close it at once; a running exchange ends with `ConnectionError`."""
        if self._transport:
            self._transport.abort()

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send a whole request and hand its answer to `sink`; returns the status.

        Raises what `sink` raises, `BadStream` for what is no HTTP, `ConnectionError` for a connection that breaks.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._sink, self.sent = sink, None
        self._begin()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        if not self._transport.get_write_buffer_size():
            self.sent = time.monotonic()
        try:
            return await self._done
        finally:
            finished = self._done.done() and not self._done.cancelled() and self._done.exception() is None
            self._done = self._sink = None
            if not finished:
                self.close()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._bytes = 0
        self._to_the_end = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's: the connection is there. `resume_writing` then tells when all has left."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def resume_writing(self) -> None:
        """Asyncio's: the buffer of a request is empty."""
        self.sent = time.monotonic()

    def data_received(self, data: bytes) -> None:
        """Asyncio's: bytes have come."""
        self._now = time.monotonic()
        if self._done is None:  # an answer that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(BadStream("not HTTP", str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's: the connection is gone, which is also how an answer without a length ends."""
        if exc is None and self._to_the_end and self._parser.get_status_code():
            self._finish(keep=False)
        elif self._parser.get_status_code():
            self._fail(BadStream("closed early", "the server closed the connection in the middle of an answer"))
        else:
            self._fail(exc or ConnectionResetError("the server closed the connection without an answer"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Httptools': one header."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._to_the_end = False

    def on_body(self, body: bytes) -> None:
        """Httptools': a piece of the body."""
        self._bytes += len(body)
        if self._bytes > PAGE_BYTES_MAX:
            raise BadStream("endless answer", f"more than {PAGE_BYTES_MAX} bytes")
        if self._sink:
            self._sink(self._parser.get_status_code(), body, self._now)

    def on_message_complete(self) -> None:
        """Httptools': the answer is whole."""
        self._finish(keep=self._parser.should_keep_alive())

    def _finish(self, keep: bool) -> None:
        if self._done and not self._done.done():
            self._done.set_result(self._parser.get_status_code())
        if not keep and self._transport:
            self._transport.close()

    def _fail(self, error: BaseException) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(error)
        self.close()
