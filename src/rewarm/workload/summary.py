"""One pass over a trace: its size, its lengths and, where it names blocks, its hit curve. Feeds `rewarm trace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rewarm.errors import ConfigError
from rewarm.workload.hitcurve import HitCurve, HitCurveBuilder
from rewarm.workload.requests import UNKNOWN, Requests, Trace

SCHEMA = "rewarm.trace/1"
SAMPLED_AT = (1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8)
"""Capacities of a sampled curve where none are asked for: errors are counted while reading, before its end is known."""
_STEPS = (1, 3)
"""Default capacities: 1 and 3 of every power of ten, from a tenth of a per cent of the distinct blocks up."""


class InfiniteCache(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rates when nothing is ever evicted. The error is a 95 % half width, 0 for an exact curve."""

    block_hit_rate: float
    token_hit_rate: float
    token_hit_rate_error: float = 0.0


class LruPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate of one LRU cache. The error is a 95 % half width, 0 for an exact curve."""

    cached_tokens: float
    token_hit_rate: float
    block_hit_rate: float
    token_hit_rate_error: float = 0.0


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What `rewarm trace --json` prints. Fields that the trace's format cannot give are null, and `notes` say why.

    Lengths and rates of requests are of the whole trace, also when the curve is from a sample of its sessions.
    """

    schema: str
    path: str
    format: str
    notes: tuple[str, ...]
    requests: int
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    block_tokens: int | None
    blocks: int
    distinct_blocks: int | None
    sampled_share: float
    infinite_cache: InfiniteCache | None
    lru: tuple[LruPoint, ...]
    reuse_interval_s: dict[str, float] | None
    observed_token_hit_rate: float | None
    """Hits that the trace itself reports, as a share of all input tokens."""


def summarise(
    trace: Trace,
    *,
    at: Sequence[float] | None = None,
    sample_rate: float = 1.0,
    progress: Callable[[int], None] = lambda requests: None,
) -> TraceSummary:
    """Read a trace once. `at` are LRU capacities in tokens (a default range without); `progress` gets requests read."""
    if at is None and sample_rate < 1:
        at = SAMPLED_AT
    for capacity in at or ():
        if not 0 < capacity < float("inf"):
            raise ConfigError(f"the capacity {capacity:g} tokens is not allowed; capacities are positive")
    tally = _Tally()
    builder = None
    if trace.block_tokens is not None:
        builder = HitCurveBuilder(trace.block_tokens, sample_rate=sample_rate, at=at or ())
    elif sample_rate != 1:
        raise ConfigError(f"{trace.path}: a {trace.format} trace names no blocks, so there is nothing to sample")
    for batch in trace.batches():
        tally.add(batch)
        if builder is not None:
            builder.add(batch)
        progress(len(batch))
    curve = builder.finish() if builder is not None else None
    return tally.summary(trace, _curve_fields(curve, at))


def _curve_fields(curve: HitCurve | None, at: Sequence[float] | None) -> dict[str, Any]:
    if curve is None:
        return {"infinite_cache": None, "lru": (), "reuse_interval_s": None, "distinct_blocks": None,
                "sampled_share": 1.0}  # fmt: skip
    capacities = default_capacities(curve) if at is None else at
    return {
        "infinite_cache": InfiniteCache(
            block_hit_rate=curve.block_hit_rate(),
            token_hit_rate=curve.token_hit_rate(),
            token_hit_rate_error=curve.error[None],
        ),
        "lru": tuple(
            LruPoint(
                cached_tokens=capacity,
                token_hit_rate=curve.token_hit_rate(capacity),
                block_hit_rate=curve.block_hit_rate(capacity),
                token_hit_rate_error=curve.error.get(capacity, 0.0),
            )
            for capacity in capacities
        ),
        "reuse_interval_s": curve.reuse_interval_s,
        "distinct_blocks": round(curve.distinct_blocks / curve.scale),
        "sampled_share": curve.scale,
    }


def default_capacities(curve: HitCurve) -> list[float]:
    """1 and 3 of every power of ten up to where the curve ends."""
    largest = curve.capacity_tokens(curve.token_hit_rate()) or curve.block_tokens
    exponents = range(len(str(max(largest // 1000, 1))) - 1, len(str(largest)) + 1)
    steps = [float(step * 10**power) for power in exponents for step in _STEPS]
    return [step for step in steps if largest / 1000 <= step < largest * _STEPS[1]]


class _Tally:
    """Sums over all requests of a trace."""

    def __init__(self) -> None:
        self._requests = self._input = self._output = self._blocks = self._hits = 0
        self._hits_known = True
        self._end_s = 0.0

    def add(self, batch: Requests) -> None:
        self._requests += len(batch)
        self._input += int(batch.input_tokens.sum())
        self._output += int(batch.output_tokens.sum())
        self._blocks += len(batch.blocks)
        self._hits_known &= bool(np.all(batch.hit_tokens != UNKNOWN))
        self._hits += int(batch.hit_tokens.sum())
        self._end_s = float(batch.arrival_s[-1])

    def summary(self, trace: Trace, curve: dict[str, Any]) -> TraceSummary:
        return TraceSummary(
            schema=SCHEMA,
            path=trace.path,
            format=trace.format,
            notes=trace.notes,
            requests=self._requests,
            duration_s=self._end_s,
            mean_input_tokens=self._input / self._requests,
            mean_output_tokens=self._output / self._requests,
            block_tokens=trace.block_tokens,
            blocks=self._blocks,
            observed_token_hit_rate=self._hits / self._input if self._hits_known else None,
            **curve,
        )
