"""Hit curves against a plain simulation of an LRU cache, and samples against the exact curve."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.workload import HitCurve, HitCurveBuilder, Requests
from rewarm.workload.chains import SessionFinder, sampled, select
from rewarm.workload.loghist import DurationHistogram
from rewarm.workload.requests import RequestsBuilder, Row

BLOCK = 10


def requests_of(prompts: list[list[int]], tail: int = 3, session: list[int] | None = None) -> Requests:
    """One request per list of blocks; the last block holds `tail` tokens only."""
    builder = RequestsBuilder(BLOCK)
    for index, blocks in enumerate(prompts):
        tokens = max(len(blocks) * BLOCK - tail, 1)
        builder.add(Row(f"row {index}", float(index), tokens, 1, blocks, -1 if session is None else session[index]))
    return builder.take()


def curve_of(requests: Requests) -> HitCurve:
    builder = HitCurveBuilder(BLOCK)
    builder.add(requests)
    return builder.finish()


def lru_hit_tokens(requests: Requests, capacity: int) -> int:
    """Tokens of leading runs found in a real LRU cache of that many blocks."""
    cache: OrderedDict[int, None] = OrderedDict()
    tokens = requests.block_tokens_of(BLOCK)
    hits = 0
    for index in range(len(requests)):
        leading = True
        for place in range(requests.offsets[index], requests.offsets[index + 1]):
            block = int(requests.blocks[place])
            leading &= block in cache
            hits += int(tokens[place]) if leading else 0
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


prompts = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 6)).map(lambda t: [t[0] * 100 + k for k in range(t[1])]),
    min_size=1, max_size=30,
)  # fmt: skip


@settings(max_examples=60)
@given(prompts=prompts)
def test_every_capacity_equals_a_simulated_lru_cache(prompts: list[list[int]]) -> None:
    requests = requests_of(prompts)
    curve = curve_of(requests)
    total = int(requests.input_tokens.sum())
    for capacity in (0, 1, 2, 3, 5, 8, 13, 40):
        expected = lru_hit_tokens(requests, capacity) / total
        assert curve.token_hit_rate(capacity * BLOCK) == pytest.approx(expected)
    assert curve.token_hit_rate() == pytest.approx(lru_hit_tokens(requests, 10**6) / total)


def test_a_block_behind_a_missed_one_is_no_hit() -> None:
    curve = curve_of(requests_of([[1, 2], [9, 2]], tail=0))
    assert curve.token_hit_rate() == 0
    assert curve.block_hit_rate() == 0


def test_capacity_for_a_hit_rate_is_the_smallest_one() -> None:
    curve = curve_of(requests_of([[1, 2, 3], [4], [1, 2, 3], [4]], tail=0))
    rate = curve.token_hit_rate()
    capacity = curve.capacity_tokens(rate)
    assert capacity == 4 * BLOCK
    assert curve.token_hit_rate(capacity) == rate
    assert curve.token_hit_rate(capacity - BLOCK) < rate
    assert curve.capacity_tokens(rate + 0.01) is None


def conversations(count: int, turns: int, rng: np.random.Generator) -> list[list[int]]:
    """Interleaved conversations that grow turn by turn behind one common first block."""
    lengths = np.zeros(count, dtype=int)
    found = []
    for session in rng.permutation(np.repeat(np.arange(count), turns)):
        lengths[session] += 2 + int(rng.integers(3))
        found.append([0] + [1 + int(session) * 1000 + k for k in range(lengths[session])])
    return found


def test_a_sample_of_sessions_agrees_within_its_error() -> None:
    requests = requests_of(conversations(400, 6, np.random.default_rng(1)))
    exact = curve_of(requests)
    at = (2000.0, 8000.0)
    for seed in range(4):
        builder = HitCurveBuilder(BLOCK, sample_rate=0.3, at=at, seed=seed)
        builder.add(requests)
        sample = builder.finish()
        assert 0.2 < sample.scale < 0.4
        for capacity in (*at, None):
            error = sample.error[capacity]
            assert 0 < error < 0.1
            assert sample.token_hit_rate(capacity) == pytest.approx(exact.token_hit_rate(capacity), abs=2 * error)


def test_an_exact_curve_has_no_error_and_a_sample_of_nothing_is_refused() -> None:
    requests = requests_of([[1], [1]])
    assert set(curve_of(requests).error.values()) == {0.0}
    builder = HitCurveBuilder(BLOCK, sample_rate=1e-9)
    builder.add(requests)
    with pytest.raises(ConfigError, match="holds no request"):
        builder.finish()
    with pytest.raises(ConfigError, match="sample_rate is 0"):
        HitCurveBuilder(BLOCK, sample_rate=0)


def test_conversations_are_found_as_sessions() -> None:
    requests = requests_of(conversations(50, 5, np.random.default_rng(2)))
    found = SessionFinder(BLOCK).assign(requests)
    truth = np.array([int(requests.blocks[start + 1]) // 1000 for start in requests.offsets[:-1]])
    together = (found[:, None] == found[None, :]) & (truth[:, None] == truth[None, :])
    same = truth[:, None] == truth[None, :]
    # The common first block joins the first few conversations; everything else is told apart, and no turn is lost.
    assert together.sum() == same.sum()
    assert len(np.unique(found)) > 25


def test_sessions_of_the_trace_come_first() -> None:
    requests = requests_of([[1], [2], [1]], session=[5, 6, 5])
    assert SessionFinder(BLOCK).assign(requests).tolist() == [5, 6, 5]


def test_a_sample_keeps_whole_sessions_and_all_their_blocks() -> None:
    requests = requests_of(conversations(60, 4, np.random.default_rng(3)))
    sessions = SessionFinder(BLOCK).assign(requests)
    keep = sampled(sessions, 0.5)
    kept = select(replace(requests, session=sessions), keep)
    assert 0 < len(kept) < len(requests)
    assert set(kept.session.tolist()).isdisjoint(sessions[~keep].tolist())
    first = int(np.flatnonzero(keep)[0])
    expected = requests.blocks[requests.offsets[first] : requests.offsets[first + 1]]
    assert kept.blocks[: kept.offsets[1]].tolist() == expected.tolist()


def test_percentiles_of_durations_are_within_one_per_cent() -> None:
    values = np.random.default_rng(4).lognormal(3, 2, 20_000)
    histogram = DurationHistogram()
    histogram.add(values[:9000])
    histogram.add(values[9000:])
    for percent in (10, 50, 90, 99):
        assert histogram.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.01)
    histogram.add(np.zeros(200_000))
    assert histogram.percentile(50) == 0.0
    assert np.isnan(DurationHistogram().percentile(50))
