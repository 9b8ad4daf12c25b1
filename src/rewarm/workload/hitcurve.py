"""What a trace hits in an LRU cache of every capacity, from one pass over its batches.

A request hits for its longest leading run of blocks whose stack distance is below the capacity. Exact for every
capacity at once, or from a sample of whole sessions with its sampling error: a cache of `c` blocks is then one of
`c * scale` blocks for the sample, `scale` being the share of all references that were sampled (Waldspurger, Park,
Garthwaite, Ahmad: Efficient MRC construction with SHARDS, 2015). One cache for all requests; nodes are the planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewarm.errors import ConfigError
from rewarm.workload.chains import SessionFinder, sampled, select
from rewarm.workload.loghist import DurationHistogram
from rewarm.workload.requests import Requests, concatenate
from rewarm.workload.stack import StackDistances

CHUNK_BLOCKS = 1 << 20
"""References per chunk of the stack; more once more distinct blocks than this are known."""
NEVER = 1 << 40
"""Stands for the distance of a first touch, and of all that follows one in a request."""
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class HitCurve:
    """Hit rates of a trace. `hit_tokens[c]` and `hit_blocks[c]` are what an LRU cache of `c` blocks hits; of a sample,
    `c` counts in blocks of the sample (`scale`), and `requests` and all sums are the sample's."""

    block_tokens: int
    requests: int
    input_tokens: int
    output_tokens: int
    blocks: int
    distinct_blocks: int
    duration_s: float
    hit_tokens: NDArray[np.float64]
    hit_blocks: NDArray[np.float64]
    reuse_interval_s: dict[str, float]
    scale: float
    """Share of the trace's references that the curve was made from: 1.0 is exact."""
    error: dict[float | None, float]
    """Half width of the 95 % confidence interval of `token_hit_rate` from the choice of sessions, per capacity asked
    for; None is the infinite cache. Zero for an exact curve."""

    def token_hit_rate(self, cached_tokens: float | None = None) -> float:
        """Share of all input tokens found in a cache of that many tokens; without one, in an infinite cache."""
        return float(self.hit_tokens[self._index(cached_tokens)]) / self.input_tokens

    def block_hit_rate(self, cached_tokens: float | None = None) -> float:
        """Share of all block references found in a cache of that many tokens; without one, in an infinite cache."""
        return float(self.hit_blocks[self._index(cached_tokens)]) / max(self.blocks, 1)

    def capacity_tokens(self, token_hit_rate: float) -> int | None:
        """The smallest cache, in tokens, that reaches a token hit rate; None when no cache does."""
        index = int(np.searchsorted(self.hit_tokens, token_hit_rate * self.input_tokens))
        return None if index >= len(self.hit_tokens) else round(index / self.scale) * self.block_tokens

    def _index(self, cached_tokens: float | None) -> int:
        last = len(self.hit_tokens) - 1
        return last if cached_tokens is None else min(int(cached_tokens / self.block_tokens * self.scale), last)


class HitCurveBuilder:
    """Takes the batches of one trace in order and gives its `HitCurve`."""

    def __init__(self, block_tokens: int, *, sample_rate: float = 1.0, at: Sequence[float] = (), seed: int = 0) -> None:
        if not 0 < sample_rate <= 1:
            raise ConfigError(f"sample_rate is {sample_rate}; allowed are values above 0 up to 1")
        self._block_tokens = block_tokens
        self._rate, self._seed, self._at = sample_rate, seed, tuple(at)
        self._stack, self._finder = StackDistances(), SessionFinder(block_tokens)
        self._intervals = DurationHistogram()
        self._pending: list[Requests] = []
        self._pending_blocks = 0
        self._requests = self._input = self._output = self._blocks = self._offered = 0
        self._first_s, self._latest_s = float("nan"), float("nan")
        self._token_hist: NDArray[np.float64] = np.zeros(1)
        self._block_hist: NDArray[np.float64] = np.zeros(1)
        self._errors = _ClusterErrors(len(self._at) + 1)

    def add(self, batch: Requests) -> None:
        """Take the next batch. Work happens in chunks, so a call may return at once."""
        self._offered += len(batch.blocks)
        if self._rate < 1:
            sessions = self._finder.assign(batch)
            batch = select(_with_sessions(batch, sessions), sampled(sessions, self._rate, self._seed))
        if not len(batch):
            return
        self._pending.append(batch)
        self._pending_blocks += len(batch.blocks)
        if self._pending_blocks >= max(CHUNK_BLOCKS, self._stack.distinct):
            self._flush()

    def finish(self) -> HitCurve:
        """The curve over everything that was added."""
        self._flush()
        if not self._requests:
            raise ConfigError(f"a sample of {self._rate:g} of the sessions holds no request; use a larger one")
        error = self._errors.half_widths() if self._rate < 1 else [0.0] * (len(self._at) + 1)
        return HitCurve(
            block_tokens=self._block_tokens,
            requests=self._requests,
            input_tokens=self._input,
            output_tokens=self._output,
            blocks=self._blocks,
            distinct_blocks=self._stack.distinct,
            duration_s=self._latest_s - self._first_s,
            hit_tokens=np.concatenate([[0.0], np.cumsum(self._token_hist)]),
            hit_blocks=np.concatenate([[0.0], np.cumsum(self._block_hist)]),
            reuse_interval_s={f"p{p}": self._intervals.percentile(p) for p in (10, 50, 90, 99)},
            scale=max(self._blocks, 1) / max(self._offered, 1) if self._rate < 1 else 1.0,
            error=dict(zip([*self._at, None], error, strict=True)),
        )

    def _flush(self) -> None:
        if not self._pending:
            return
        batch = concatenate(self._pending)
        self._pending, self._pending_blocks = [], 0
        owners = batch.owners()
        reuse = self._stack.push(batch.blocks, batch.arrival_s[owners])
        self._intervals.add(reuse.interval_s[~np.isnan(reuse.interval_s)])
        distance = leading_distance(np.minimum(reuse.distance, NEVER), owners)
        tokens = batch.block_tokens_of(self._block_tokens)
        hit = distance < NEVER
        self._token_hist = _add_counts(self._token_hist, distance[hit], tokens[hit])
        self._block_hist = _add_counts(self._block_hist, distance[hit], np.ones(int(hit.sum())))
        if self._rate < 1:
            limits = [capacity / self._block_tokens * self._rate for capacity in self._at] + [NEVER]
            hits = [np.bincount(owners, tokens * (distance < limit), len(batch)) for limit in limits]
            self._errors.add(batch.session, batch.input_tokens, hits)
        self._count(batch)

    def _count(self, batch: Requests) -> None:
        if not self._requests:
            self._first_s = float(batch.arrival_s[0])
        self._latest_s = float(batch.arrival_s[-1])
        self._requests += len(batch)
        self._input += int(batch.input_tokens.sum())
        self._output += int(batch.output_tokens.sum())
        self._blocks += len(batch.blocks)


def leading_distance(distance: NDArray[np.int64], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest distance from the first block of the request up to each block: it is hit if that is in the cache."""
    step = NEVER + 1
    return np.asarray(np.maximum.accumulate(distance + owners * step) - owners * step)


def _add_counts(
    histogram: NDArray[np.float64], places: NDArray[np.int64], weights: NDArray[np.float64] | NDArray[np.int64]
) -> NDArray[np.float64]:
    added = np.bincount(places, weights, len(histogram)).astype(np.float64)
    added[: len(histogram)] += histogram
    return added


def _with_sessions(batch: Requests, sessions: NDArray[np.int64]) -> Requests:
    return Requests(
        batch.arrival_s, batch.input_tokens, batch.output_tokens, sessions, batch.hit_tokens, batch.offsets,
        batch.blocks,
    )  # fmt: skip


class _ClusterErrors:
    """Sampling error of hit rates from a sample of sessions: a ratio estimator over clusters (Cochran, 1977, ch. 6)."""

    def __init__(self, rates: int) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}
        self._rates = rates

    def add(self, sessions: NDArray[np.int64], tokens: NDArray[np.int64], hits: Sequence[NDArray[Any]]) -> None:
        unique, inverse = np.unique(sessions, return_inverse=True)
        columns = np.stack([np.bincount(inverse, values, len(unique)) for values in (tokens, *hits)], axis=1)
        for session, row in zip(unique.tolist(), columns, strict=True):
            self._sums[session] = self._sums[session] + row if session in self._sums else row

    def half_widths(self) -> list[float]:
        table = np.stack(list(self._sums.values()))
        count = len(table)
        if count < 2:
            return [float("nan")] * self._rates
        tokens, hits = table[:, 0], table[:, 1:]
        rate = hits.sum(axis=0) / tokens.sum()
        residual = hits - rate * tokens[:, None]
        variance = (residual**2).sum(axis=0) / (count - 1) * count / tokens.sum() ** 2
        return [float(width) for width in _NORMAL_95 * np.sqrt(variance)]
