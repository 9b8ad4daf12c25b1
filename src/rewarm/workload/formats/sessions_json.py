"""Session files of coding agents: one JSON object per session, `hash_ids` numbered within the file (`"local"` scope).

A directory of such files is one trace: every file starts its own clock at zero, so all sessions start together, and
ids of different files never meet. What the sessions share in truth (tools, system prompt) cannot be seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rewarm.errors import ConfigError
from rewarm.workload.formats.source import Source, decode, open_text
from rewarm.workload.requests import Row, Trace

_FILE_BITS = 40
"""Ids below 2**40 per file leave room for 2**23 files in 63 bits."""

NOTE = "block ids are local to each session file: what sessions share with each other is not seen, and all start at 0 s"


class _Request(msgspec.Struct):
    t: float
    input_tokens: int = msgspec.field(name="in", default=0)
    out: int = 0
    hash_ids: list[int] = []


class _Session(msgspec.Struct):
    block_size: int
    hash_id_scope: str
    requests: list[_Request]
    id: str = ""


def matches(head: dict[str, object]) -> bool:
    """Whether the object of a file, or of its first line, is of this format."""
    return "requests" in head and "hash_id_scope" in head


def open_source(source: Source, head: dict[str, object]) -> Trace:
    """The trace behind one session file or a directory of them."""
    first = _read(source.files[0])
    for file in source.files[1:]:
        if _read(file).block_size != first.block_size:
            raise ConfigError(f"{file}: block_size differs from {first.block_size} of {source.files[0]}")

    def rows() -> Iterator[Row]:
        return heapq.merge(
            *(_rows(file, number) for number, file in enumerate(source.files)), key=lambda row: row.arrival_s
        )

    return Trace(str(source.path), "agent-sessions", first.block_size, (NOTE,), rows)


def _read(file: Path) -> _Session:
    with open_text(file) as stream:
        text = stream.read()
    session = decode(str(file), text, msgspec.json.Decoder(_Session))
    if session.block_size <= 0:
        raise ConfigError(f"{file}: block_size is {session.block_size}; it must be positive")
    if session.hash_id_scope not in ("local", "global"):
        raise ConfigError(f"{file}: hash_id_scope is {session.hash_id_scope!r}; known are 'local' and 'global'")
    return session


def _rows(file: Path, number: int) -> Iterator[Row]:
    session = _read(file)
    base = number << _FILE_BITS if session.hash_id_scope == "local" else 0
    latest = 0.0
    for index, request in enumerate(session.requests, start=1):
        where = f"{file}: request {index}"
        if request.t < latest:
            raise ConfigError(f"{where}: t goes back from {latest:g} to {request.t:g} s; requests must be sorted by t")
        latest = request.t
        if any(not 0 <= block < 1 << _FILE_BITS for block in request.hash_ids):
            raise ConfigError(f"{where}: a hash id is outside 0 to 2**{_FILE_BITS}")
        blocks = [base + block for block in request.hash_ids]
        yield Row(where, request.t, request.input_tokens, request.out, blocks, session=number)
