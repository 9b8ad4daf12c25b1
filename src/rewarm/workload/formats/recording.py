"""Rewarm's own trace: what a connector looked up and saved, with hashed keys. Written here and read here.

The first line is `{"rewarm_trace": 1, "block_tokens": N}`; every other line is one lookup or one save. Keys are hashed
with a secret of the recording, so equal blocks stay equal within a file and nothing else can be learned from it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec
import xxhash

from rewarm.errors import ConfigError
from rewarm.workload.formats.source import Source, decode
from rewarm.workload.requests import UNKNOWN, Row, Trace

VERSION = 1
NOTE = "an engine's recording has no output lengths: it is asked when a request comes, not when it ends"


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a recording."""

    rewarm_trace: int
    block_tokens: int


class Event(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One line: a lookup (`input_tokens` is the prompt's length) or a save, `t` in seconds since the start."""

    t: float
    op: str
    keys: list[str]
    input_tokens: int = 0
    output_tokens: int = 0
    session: int = UNKNOWN
    hit_tokens: int = UNKNOWN


class TraceWriter:
    """Writes a recording to a binary stream of the caller's. Not safe for several threads at once."""

    def __init__(self, stream: IO[bytes], block_tokens: int) -> None:
        if block_tokens <= 0:
            raise ConfigError(f"block_tokens is {block_tokens}; it must be positive")
        self._stream = stream
        self._secret = secrets.randbits(64)
        self._write(Head(VERSION, block_tokens))

    def lookup(
        self,
        t: float,
        keys: Sequence[bytes],
        input_tokens: int,
        *,
        output_tokens: int = 0,
        session: int = UNKNOWN,
        hit_tokens: int = UNKNOWN,
    ) -> None:
        """Record one request: its keys in prefix order and the length of its prompt."""
        hashed = self._hashed(keys)
        self._write(Event(t, "lookup", hashed, input_tokens, output_tokens, session, hit_tokens))

    def save(self, t: float, keys: Sequence[bytes]) -> None:
        """Record blocks that the engine gave away."""
        self._write(Event(t, "save", self._hashed(keys)))

    def _hashed(self, keys: Sequence[bytes]) -> list[str]:
        return [xxhash.xxh3_64_hexdigest(key, seed=self._secret) for key in keys]

    def _write(self, value: Head | Event) -> None:
        self._stream.write(msgspec.json.encode(value) + b"\n")


def matches(head: dict[str, object]) -> bool:
    """Whether the first line of a file is of this format."""
    return "rewarm_trace" in head


def open_source(source: Source, head: dict[str, object]) -> Trace:
    """The trace behind a recording whose first line is `head`."""
    start = decode(f"{source.files[0]}:1", msgspec.json.encode(head).decode(), msgspec.json.Decoder(Head))
    if start.rewarm_trace != VERSION:
        raise ConfigError(f"{source.files[0]}:1: rewarm_trace is {start.rewarm_trace}; this version reads {VERSION}")
    if start.block_tokens <= 0:
        raise ConfigError(f"{source.files[0]}:1: block_tokens is {start.block_tokens}; it must be positive")

    def rows() -> Iterator[Row]:
        decoder = msgspec.json.Decoder(Event)
        lines = source.lines()
        next(lines)
        for where, text in lines:
            if not text.endswith("\n") and not text.rstrip().endswith("}"):
                return  # the engine was killed, or its disk was full, in the middle of the last line
            event = decode(where, text, decoder)
            if event.op == "save":
                continue
            if event.op != "lookup":
                raise ConfigError(f"{where}: op is {event.op!r}; known are 'lookup' and 'save'")
            blocks = [_number(where, key) for key in event.keys]
            yield Row(where, event.t, event.input_tokens, event.output_tokens, blocks, event.session, event.hit_tokens)

    return Trace(str(source.path), "rewarm", start.block_tokens, (NOTE,), rows)


def _number(where: str, key: str) -> int:
    try:
        return int(key, 16) & (1 << 64) - 1
    except ValueError as error:
        raise ConfigError(f"{where}: the key {key!r} is not hexadecimal") from error
