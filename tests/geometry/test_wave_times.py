"""Closed forms of waves against a simulation written here, against identities, and against published readings."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.geometry import (
    all_at_once,
    arrival_order,
    closed_loop_requests_per_s,
    concurrency_of,
    knee_concurrency,
    load_of,
    open_loop_mean_s,
    requests_per_s_of,
    shortest_first,
)

SIZES = st.lists(st.floats(0, 1e9), min_size=1, max_size=30)
ORDERS = [all_at_once, arrival_order, shortest_first]

REQUEST_BYTES = 7_671_382_016  # 30,208 tokens of 253,952 bytes
LOCAL, ARRAY = 6.94e9, 9.8e9  # one drive's peak; the array's busy rate


def shared_by_events(sizes: list[float], bandwidth: float) -> list[float]:
    """Egalitarian processor sharing, one departure after another."""
    left, ends, now = dict(enumerate(sizes)), [0.0] * len(sizes), 0.0
    while left:
        smallest = min(left.values())
        now += smallest * len(left) / bandwidth
        left = {i: size - smallest for i, size in left.items()}
        for i in [i for i, size in left.items() if size <= 0]:
            ends[i] = now
            del left[i]
    return ends


@given(SIZES, st.floats(1e6, 1e11), st.floats(0, 10))
def test_sharing_equals_a_simulation_of_it(sizes: list[float], bandwidth: float, fixed: float) -> None:
    expected = [fixed + end for end in shared_by_events(sizes, bandwidth)]
    assert all_at_once(sizes, bandwidth, fixed) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(SIZES, st.floats(1e6, 1e11), st.floats(0, 10))
def test_every_order_ends_together_and_shortest_first_is_best_on_average(
    sizes: list[float], bandwidth: float, fixed: float
) -> None:
    shared, arrived, shortest = (order(sizes, bandwidth, fixed) for order in ORDERS)
    last = pytest.approx(fixed + sum(sizes) / bandwidth, rel=1e-9, abs=1e-9)
    assert shared.max() == last
    assert arrived.max() == last
    assert shortest.max() == last
    slack = 1e-9 * (1 + arrived.mean())
    assert shortest.mean() <= arrived.mean() + slack
    assert np.all(shortest <= shared + slack)  # nobody loses by it when all start together


@given(st.permutations([5.0, 1.0, 3.0, 1.0, 9.0]))
def test_ends_come_back_in_the_order_given(sizes: list[float]) -> None:
    for order in (all_at_once, shortest_first):
        ends = dict(zip(sizes, order(sizes, 1.0), strict=True))
        assert ends[9.0] == 19.0
        assert ends[3.0] == {all_at_once: 1 * 5 + 2 * 3, shortest_first: 1 + 1 + 3}[order]
    assert list(arrival_order(sizes, 1.0)) == list(np.cumsum(sizes))


def test_equal_requests_share_one_end_and_in_order_the_median_halves() -> None:
    sizes = [REQUEST_BYTES] * 32
    shared, arrived = all_at_once(sizes, LOCAL), arrival_order(sizes, LOCAL)
    assert np.ptp(shared) == pytest.approx(0, abs=1e-9)
    assert np.median(arrived) / np.median(shared) == pytest.approx(33 / 64)  # (N + 1) / 2N
    assert list(shortest_first(sizes, LOCAL)) == list(arrived)


@pytest.mark.parametrize(
    ("bandwidth", "concurrency", "published_ttft_s"),
    [(LOCAL, 8, 10.17), (LOCAL, 32, 35.73), (ARRAY, 8, 7.53), (ARRAY, 32, 26.35)],
)
def test_published_waves_are_explained_within_three_per_cent(
    bandwidth: float, concurrency: int, published_ttft_s: float
) -> None:
    # R1 of "Local NVMe or an NVMe-oF Array for KV Cache?" (2026-11-12); the cells at 16 were partly warm
    ends = all_at_once([REQUEST_BYTES] * concurrency, bandwidth, fixed_s=1.25)
    assert np.median(ends) == pytest.approx(published_ttft_s, rel=0.03)


@pytest.mark.parametrize(
    ("concurrency", "ttft_s", "tpot_s", "published_tokens_per_s"),
    [
        (8, 10.17, 0.0175, 43.9),
        (16, 17.31, 0.023, 53.6),
        (32, 35.73, 0.0295, 53.9),
        (8, 7.53, 0.0175, 56.6),
        (16, 11.85, 0.023, 74.9),
        (32, 26.35, 0.0295, 71.6),
    ],
)
def test_littles_law_gives_the_published_throughput(
    concurrency: int, ttft_s: float, tpot_s: float, published_tokens_per_s: float
) -> None:
    requests = requests_per_s_of(concurrency, ttft_s, 63, tpot_s, think_s=0.35)  # 63 gaps between 64 tokens
    assert requests * 64 == pytest.approx(published_tokens_per_s, rel=0.01)
    assert concurrency_of(requests, ttft_s, 63, tpot_s, think_s=0.35) == pytest.approx(concurrency)


def test_closed_loop_bounds_meet_at_the_knee() -> None:
    parts = {"fixed_s": 1.25, "decode_s": 1.5, "think_s": 2.0}
    knee = knee_concurrency(REQUEST_BYTES, LOCAL, **parts)
    assert knee == pytest.approx(4.75 * LOCAL / REQUEST_BYTES + 1)
    saturated = LOCAL / REQUEST_BYTES
    assert closed_loop_requests_per_s(knee, REQUEST_BYTES, LOCAL, **parts) == pytest.approx(saturated)
    assert closed_loop_requests_per_s(10 * knee, REQUEST_BYTES, LOCAL, **parts) == saturated
    assert closed_loop_requests_per_s(knee / 2, REQUEST_BYTES, LOCAL, **parts) == pytest.approx(saturated / 2)


def test_open_loop_mean_grows_with_the_load_until_it_has_no_end() -> None:
    assert load_of(0.7, 1e9, 1e9) == pytest.approx(0.7)
    assert open_loop_mean_s(0.0, 1e9, 1e9) == 1.0
    assert open_loop_mean_s(0.7, 1e9, 1e9) == pytest.approx(1 / 0.3)
    assert open_loop_mean_s(1.0, 1e9, 1e9) == math.inf


def test_open_loop_mean_equals_a_simulated_queue() -> None:
    # Processor sharing of Poisson arrivals and unequal sizes; seeded, so that it is the same every time.
    random = np.random.default_rng(7)
    count, load = 40_000, 0.6
    arrivals = np.cumsum(random.exponential(1 / load, count))
    sizes = random.choice([0.2, 1.8], count)  # mean 1 at bandwidth 1
    assert simulated_mean(arrivals, sizes) == pytest.approx(open_loop_mean_s(load, 1.0, 1.0), rel=0.05)


def simulated_mean(arrivals: np.ndarray, sizes: np.ndarray) -> float:
    shared, now, total = 0.0, 0.0, 0.0  # what each present request has been served so far since the start
    present: list[tuple[float, float]] = []
    for arrival, size in zip(arrivals, sizes, strict=True):
        while present and now + (present[0][0] - shared) * len(present) <= arrival:
            end, came = present[0]
            now += (end - shared) * len(present)
            shared = end
            heapq.heappop(present)
            total += now - came
        if present:
            shared += (arrival - now) / len(present)
        now = arrival
        heapq.heappush(present, (shared + size, arrival))
    while present:
        end, came = present[0]
        now += (end - shared) * len(present)
        shared = end
        heapq.heappop(present)
        total += now - came
    return total / len(sizes)


@pytest.mark.parametrize("order", ORDERS)
def test_impossible_waves_are_refused(order: object) -> None:
    call = order
    assert callable(call)
    for sizes in ([-1.0], [math.nan], [math.inf], [[1.0, 2.0]]):
        with pytest.raises(ConfigError, match="sizes_bytes"):
            call(sizes, 1.0)
    for bandwidth in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="bandwidth_bytes_per_s"):
            call([1.0], bandwidth)
    with pytest.raises(ConfigError, match="fixed_s"):
        call([1.0], 1.0, -1.0)
    assert len(call([], 1.0)) == 0


def test_impossible_loops_are_refused() -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        closed_loop_requests_per_s(0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="think_s"):
        knee_concurrency(1.0, 1.0, think_s=-1)
    with pytest.raises(ConfigError, match="requests_per_s"):
        open_loop_mean_s(-1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="ttft_s"):
        requests_per_s_of(8, 0.0, 0, 0.0)
