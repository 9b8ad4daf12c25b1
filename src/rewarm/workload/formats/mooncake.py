"""Mooncake traces: one JSON object a line, `timestamp` in ms, lengths, and `hash_ids` that are global to the file.

A block is 512 tokens unless the line says `block_size`. The last id of a line covers what is left of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rewarm.workload.formats.source import Source, decode
from rewarm.workload.requests import Row, Trace

BLOCK_TOKENS = 512
"""Tokens per hash id in the published traces (FAST'25 release)."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_size: int = BLOCK_TOKENS


def matches(head: dict[str, object]) -> bool:
    """Whether the first line of a file is of this format."""
    return "hash_ids" in head and "input_length" in head and "timestamp" in head


def open_source(source: Source, head: dict[str, object]) -> Trace:
    """The trace behind a file whose first line is `head`."""

    def rows() -> Iterator[Row]:
        decoder = msgspec.json.Decoder(_Line)
        for where, text in source.lines():
            line = decode(where, text, decoder)
            yield Row(where, line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)

    size = head.get("block_size", BLOCK_TOKENS)
    block_tokens = size if isinstance(size, int) and size > 0 else BLOCK_TOKENS
    return Trace(str(source.path), "mooncake", block_tokens, (), rows)
