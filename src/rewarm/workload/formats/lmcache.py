"""What LMCache writes about lookups, in a server of its own or inside vLLM: hash files, and lines of the server's log.

Hash files (`--lookup-hash-log-dir`) are JSON lines with `chunk_hashes` of the full chunks of every prompt. The log of
a vLLM server with LMCache has one line per lookup with the prompt's length and the tokens found; it names no blocks.
vLLM alone writes no log of lookups.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from datetime import datetime

import msgspec

from rewarm.errors import ConfigError
from rewarm.workload.formats.source import Source, block_id, decode
from rewarm.workload.requests import UNKNOWN, Row, Trace

HASH_NOTE = "the lookup log has no output lengths, and the tail of a prompt that fills no chunk always counts as missed"
LOG_NOTE = "the server log names no blocks: the observed hits are shown, no hit rate of another capacity follows"
_LINE = re.compile(
    r"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\].*Reqid: (?P<request>\S+), Total tokens (?P<total>\d+),"
    r".*LMCache hit tokens: (?P<hit>\d+|None)"
)
_REMEMBERED = 1 << 16
"""Request ids kept to drop the repeated lines of a request that was asked for again."""


class _Lookup(msgspec.Struct):
    timestamp: float
    chunk_size: int
    seq_len: int
    chunk_hashes: list[str]


def matches(head: dict[str, object]) -> bool:
    """Whether the first line of a file is of the hash files' format."""
    return "chunk_hashes" in head and "seq_len" in head


def open_source(source: Source, head: dict[str, object]) -> Trace:
    """The trace behind lookup-hash files whose first line is `head`."""
    chunk = head.get("chunk_size")
    if not isinstance(chunk, int) or chunk <= 0:
        raise ConfigError(f"{source.files[0]}:1: chunk_size is {chunk!r}; it must be a positive number of tokens")

    def rows() -> Iterator[Row]:
        decoder = msgspec.json.Decoder(_Lookup)
        for where, text in source.lines():
            line = decode(where, text, decoder)
            if line.chunk_size != chunk:
                raise ConfigError(f"{where}: chunk_size {line.chunk_size} differs from {chunk} of the first line")
            yield Row(where, line.timestamp, line.seq_len, 0, [block_id(name) for name in line.chunk_hashes])

    return Trace(str(source.path), "lmcache-lookups", chunk, (HASH_NOTE,), rows)


def matches_log(text: str) -> bool:
    """Whether the head of a text file has a lookup line of LMCache."""
    return _LINE.search(text) is not None


def open_log(source: Source) -> Trace:
    """The trace behind the log of a server that runs LMCache."""

    def rows() -> Iterator[Row]:
        seen: OrderedDict[str, None] = OrderedDict()
        for where, text in source.lines():
            found = _LINE.search(text)
            if not found or found["hit"] == "None" or found["request"] in seen:
                continue
            seen[found["request"]] = None
            if len(seen) > _REMEMBERED:
                seen.popitem(last=False)
            stamp = datetime.strptime(found["stamp"], "%Y-%m-%d %H:%M:%S,%f")
            hit = min(int(found["hit"]), int(found["total"]))
            yield Row(where, stamp.timestamp(), int(found["total"]), 0, [], UNKNOWN, hit)

    return Trace(str(source.path), "lmcache-log", None, (LOG_NOTE,), rows)
