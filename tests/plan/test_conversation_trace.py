"""Published readings of the conversation trace, and what restore orders make of its hit sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rewarm.geometry import load_model
from rewarm.plan import TraceData, parse_plan
from rewarm.plan.capacity import writes_of
from rewarm.plan.cost import costs_of
from rewarm.plan.placement import distances, route, tier_tokens
from rewarm.plan.simulate import FleetModel, SimRequests, SourceRate, simulate
from rewarm.plan.spec import Fleet
from rewarm.workload import Requests, open_trace
from rewarm.workload.summary import TraceSummary, summarise

CAPACITIES = {1e6: 0.055, 3e6: 0.138, 10e6: 0.293, 50e6: 0.371}
"""LRU capacity in tokens -> published token hit rate."""


@pytest.fixture(scope="module")
def summary(conversation: Path) -> TraceSummary:
    return summarise(open_trace(conversation), at=list(CAPACITIES))


@pytest.fixture(scope="module")
def requests(conversation: Path) -> Requests:
    return open_trace(conversation).load()


@pytest.fixture(scope="module")
def hit_tokens(requests: Requests) -> NDArray[np.int64]:
    """Tokens that each request finds in an infinite cache."""
    routed = route(requests, 512, Fleet(), False, 0)
    found = distances(routed, "all", shared=False)
    tokens = tier_tokens(routed, found, dram_tokens=0, sources=((False, np.inf),), admission="all")
    return tokens.sum(axis=1)


def test_size_and_infinite_cache(summary: TraceSummary) -> None:
    assert summary.requests == 12_031
    assert summary.blocks == 288_500
    assert summary.infinite_cache is not None
    assert summary.infinite_cache.block_hit_rate == pytest.approx(0.366, abs=0.0005)
    assert summary.infinite_cache.token_hit_rate == pytest.approx(0.374, abs=0.0005)


def test_lru_within_half_a_point(summary: TraceSummary) -> None:
    found = {point.cached_tokens: point.token_hit_rate for point in summary.lru}
    assert found == pytest.approx(CAPACITIES, abs=0.005)


def test_second_sight_halves_the_hits_and_saves_three_quarters_of_the_writes(requests: Requests) -> None:
    spec = parse_plan(
        """
        model = "Llama-3.3-70B"
        [engine]
        gpu = "H100"
        gpus = 4
        [[medium]]
        name = "local"
        drive_read = "7GB/s"
        [fleet]
        tp = 4
        [workload]
        shape = "trace"
        trace = "conversation"
        """
    )
    costs = costs_of(spec, load_model(spec.model), 12_000)
    everything, second = writes_of(spec, costs, TraceData(requests, 512))
    assert (everything.admission, second.admission) == ("all", "second-sight")
    assert everything.token_hit_rate == pytest.approx(0.374, abs=0.0005)
    assert second.token_hit_rate == pytest.approx(0.218, abs=0.0005)
    # 76 % fewer blocks; in tokens a little less, because short last blocks are seldom seen twice.
    assert second.written_share == pytest.approx(1 - 0.76, abs=0.01)
    # "several hundred TB a day": 62.6 % of 40,900 tokens/s of 327,680 bytes.
    assert everything.bytes_per_day == pytest.approx(7.3e14, rel=0.02)


def restores(sizes: NDArray[np.float64], arrival_s: NDArray[np.float64]) -> SimRequests:
    count = len(sizes)
    zeros = np.zeros(count, dtype=np.int64)
    return SimRequests(
        arrival_s=arrival_s, node=zeros, instance=zeros, fixed_s=np.zeros(count), restore_bytes=sizes[:, None],
        prefill_s=np.zeros(count), output_tokens=np.ones(count, dtype=np.int64),
    )  # fmt: skip


def ttft(order: str, rate: float, requests: SimRequests) -> NDArray[np.float64]:
    return simulate(FleetModel(1, 1, (SourceRate(rate),), order, lambda n: 1.0), requests).ttft_s


@pytest.fixture(scope="module")
def sizes(hit_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Hits that go beyond the first block, which nearly all requests share and which is always in DRAM."""
    return hit_tokens[hit_tokens > 512].astype(np.float64)


def test_order_of_a_wave_of_32(sizes: NDArray[np.float64]) -> None:
    waves = sizes[: len(sizes) // 32 * 32].reshape(-1, 32)
    medians = {
        order: np.mean([np.median(ttft(order, 1e6, restores(wave, np.zeros(32)))) for wave in waves])
        for order in ("together", "arrival", "shortest")
    }
    assert medians["arrival"] / medians["together"] == pytest.approx(1.24, rel=0.1)
    assert medians["shortest"] / medians["together"] == pytest.approx(0.34, rel=0.1)


def test_order_under_open_arrivals_at_load_0_7(sizes: NDArray[np.float64]) -> None:
    rng = np.random.default_rng(1)
    count = 60_000
    work = rng.choice(sizes, count) / sizes.mean()
    asked = restores(work, np.cumsum(rng.exponential(1 / 0.7, count)))
    medians = {order: float(np.median(ttft(order, 1.0, asked))) for order in ("arrival", "together", "shortest")}
    assert medians == pytest.approx({"arrival": 2.57, "together": 1.38, "shortest": 0.61}, rel=0.1)
