"""Requests in columns: what every trace reader yields and every consumer of a trace reads.

A trace may be larger than memory, so it is an iterator of batches of bounded size. `RequestsBuilder` is the one place
that checks rows: times that go back, lengths that are not positive, more blocks than the input can have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rewarm.errors import ConfigError

BATCH_BLOCKS = 1 << 18
"""Block references in one batch: 2 MiB of ids, large enough that work per batch is vectorised."""
BATCH_REQUESTS = 1 << 16
"""Requests in one batch, for traces that carry lengths only."""
INPUT_TOKENS_MAX = 1 << 31
"""A longer prompt is a damaged line, not a request."""

UNKNOWN = -1
"""In `session` and `hit_tokens`: the trace does not say."""


class Row(NamedTuple):
    """One request as a reader found it. `where` names the file and line for errors."""

    where: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: list[int]
    session: int = UNKNOWN
    hit_tokens: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in order of arrival, one array per field.

    Request `i` asks for `blocks[offsets[i]:offsets[i + 1]]`, in prefix order; block `k` of it covers
    `min(block_tokens, input_tokens[i] - k * block_tokens)` tokens. `session` and `hit_tokens` are `UNKNOWN` where the
    trace does not say.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    session: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    blocks: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.arrival_s)

    def owners(self) -> NDArray[np.int64]:
        """For every block reference the index of its request."""
        return np.asarray(np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets)))

    def block_tokens_of(self, block_tokens: int) -> NDArray[np.int64]:
        """For every block reference the tokens it covers; the last block of a prompt may be short."""
        counts = np.diff(self.offsets)
        place = np.arange(len(self.blocks), dtype=np.int64) - np.repeat(self.offsets[:-1], counts)
        left = np.repeat(self.input_tokens, counts) - place * block_tokens
        return np.asarray(np.minimum(left, block_tokens))


@dataclass(frozen=True)
class Trace:
    """A trace that can be read again and again, in batches.

    `block_tokens` is None for traces of lengths and arrivals only. `notes` say what the format cannot tell.
    """

    path: str
    format: str
    block_tokens: int | None
    notes: tuple[str, ...]
    rows: Callable[[], Iterator[Row]]

    def batches(self) -> Iterator[Requests]:
        """Read the trace once. Raises `ConfigError` at the first row that cannot be true, naming file and line."""
        builder = RequestsBuilder(self.block_tokens)
        for row in self.rows():
            builder.add(row)
            if builder.full():
                yield builder.take()
        if builder.count:
            yield builder.take()
        if not builder.seen:
            raise ConfigError(f"{self.path}: the trace has no requests")

    def load(self) -> Requests:
        """The whole trace as one batch, for traces known to fit in memory."""
        return concatenate(list(self.batches()))


class RequestsBuilder:
    """Collects checked rows and hands them out as batches. Arrivals count from the first row of the trace."""

    def __init__(self, block_tokens: int | None) -> None:
        self._block_tokens = block_tokens
        self._origin_s: float | None = None
        self._latest_s = -math.inf
        self.seen = 0
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self._fields: list[tuple[float, int, int, int, int]] = []
        self._lengths: list[int] = []
        self._blocks: list[int] = []

    def full(self) -> bool:
        """Whether the batch has reached its size."""
        return self.count >= BATCH_REQUESTS or len(self._blocks) >= BATCH_BLOCKS

    def add(self, row: Row) -> None:
        """Append one request. Raises `ConfigError` for a row that contradicts itself or the one before it."""
        self._check(row)
        if self._origin_s is None:
            self._origin_s = row.arrival_s
        self._latest_s = row.arrival_s
        fields = (row.arrival_s - self._origin_s, row.input_tokens, row.output_tokens, row.session, row.hit_tokens)
        self._fields.append(fields)
        self._lengths.append(len(row.blocks))
        self._blocks.extend(row.blocks)
        self.count += 1
        self.seen += 1

    def _check(self, row: Row) -> None:
        if not math.isfinite(row.arrival_s):
            raise ConfigError(f"{row.where}: the arrival time is {row.arrival_s}; it must be a finite number")
        if row.arrival_s < self._latest_s:
            raise ConfigError(
                f"{row.where}: the arrival time goes back from {self._latest_s:g} to {row.arrival_s:g} s; "
                "a trace must be sorted by arrival"
            )
        if not 0 < row.input_tokens <= INPUT_TOKENS_MAX:
            raise ConfigError(f"{row.where}: input tokens are {row.input_tokens}; allowed are 1 to {INPUT_TOKENS_MAX}")
        if row.output_tokens < 0:
            raise ConfigError(f"{row.where}: output tokens are {row.output_tokens}; they cannot be negative")
        if row.blocks and not (min(row.blocks) >= 0 and max(row.blocks) < 1 << 64):
            raise ConfigError(f"{row.where}: block ids are {min(row.blocks)} to {max(row.blocks)}; allowed: 64 bits")
        if self._block_tokens and len(row.blocks) > -(-row.input_tokens // self._block_tokens):
            raise ConfigError(
                f"{row.where}: {len(row.blocks)} blocks for {row.input_tokens} input tokens; "
                f"at {self._block_tokens} tokens a block there can be {-(-row.input_tokens // self._block_tokens)}"
            )

    def take(self) -> Requests:
        """Hand out what was collected and start the next batch."""
        arrival, inputs, outputs, sessions, hits = zip(*self._fields, strict=True)
        batch = Requests(
            arrival_s=np.array(arrival, dtype=np.float64),
            input_tokens=np.array(inputs, dtype=np.int64),
            output_tokens=np.array(outputs, dtype=np.int64),
            session=np.array(sessions, dtype=np.int64),
            hit_tokens=np.array(hits, dtype=np.int64),
            offsets=np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64),
            blocks=np.array(self._blocks, dtype=np.uint64),
        )
        self._clear()
        return batch


def concatenate(batches: list[Requests]) -> Requests:
    """One batch from several, in the given order."""
    starts = np.cumsum([0] + [len(batch.blocks) for batch in batches])
    offsets = [batch.offsets[:-1] + start for batch, start in zip(batches, starts[:-1], strict=True)]
    return Requests(
        arrival_s=np.concatenate([batch.arrival_s for batch in batches]),
        input_tokens=np.concatenate([batch.input_tokens for batch in batches]),
        output_tokens=np.concatenate([batch.output_tokens for batch in batches]),
        session=np.concatenate([batch.session for batch in batches]),
        hit_tokens=np.concatenate([batch.hit_tokens for batch in batches]),
        offsets=np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
        blocks=np.concatenate([batch.blocks for batch in batches]),
    )
