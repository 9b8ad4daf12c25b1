"""The simulator against closed forms, and each of its rules alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rewarm.geometry import (
    all_at_once,
    arrival_order,
    closed_loop_requests_per_s,
    concurrency_of,
    open_loop_mean_s,
    shortest_first,
)
from rewarm.plan.simulate import FleetModel, Outcome, SimRequests, SourceRate, simulate


def fleet(*sources: SourceRate, order: str = "together", nodes: int = 1, **fields: float) -> FleetModel:
    return FleetModel(nodes, 1, sources or (SourceRate(1.0),), order, lambda n: 0.01 * n, **fields)  # type: ignore[arg-type]


def requests(
    sizes: list[float] | NDArray[np.float64],
    arrival_s: list[float] | NDArray[np.float64] | None = None,
    *,
    node: list[int] | None = None,
    prefill_s: float = 0.0,
    fixed_s: float = 0.0,
    output: int = 1,
    follows: NDArray[np.int64] | None = None,
    think_s: float = 0.0,
) -> SimRequests:
    bytes_ = np.asarray(sizes, dtype=np.float64)
    bytes_ = bytes_[:, None] if bytes_.ndim == 1 else bytes_
    count = len(bytes_)
    return SimRequests(
        arrival_s=np.zeros(count) if arrival_s is None else np.asarray(arrival_s, dtype=np.float64),
        node=np.zeros(count, dtype=np.int64) if node is None else np.array(node),
        instance=np.zeros(count, dtype=np.int64),
        fixed_s=np.full(count, fixed_s),
        restore_bytes=bytes_,
        prefill_s=np.full(count, prefill_s),
        output_tokens=np.full(count, output),
        follows=follows,
        think_s=think_s,
    )


def batch_interval(values: NDArray[np.float64], batches: int = 20) -> float:
    """Half width of the 95 % confidence interval of a mean, by batch means."""
    means = [float(batch.mean()) for batch in np.array_split(values, batches)]
    return 2.09 * float(np.std(means, ddof=1)) / math.sqrt(batches)


@pytest.mark.parametrize(
    ("order", "form"), [("together", all_at_once), ("arrival", arrival_order), ("shortest", shortest_first)]
)
def test_waves_equal_the_closed_forms(order: str, form: object) -> None:
    sizes = np.random.default_rng(0).exponential(5e9, 32)
    found = simulate(fleet(SourceRate(7e9), order=order), requests(sizes, fixed_s=1.25))
    assert found.ttft_s == pytest.approx(form(sizes, 7e9, 1.25), rel=1e-9)  # type: ignore[operator]


@pytest.mark.parametrize("distribution", ["constant", "exponential", "two sizes"])
def test_open_loop_is_the_processor_sharing_queue(distribution: str) -> None:
    rng = np.random.default_rng(5)
    count, rate = 60_000, 0.6
    sizes = {
        "constant": np.ones(count),
        "exponential": rng.exponential(1, count),
        "two sizes": rng.choice([0.25, 3.25], count, p=[0.75, 0.25]),
    }[distribution]
    # The means of the draws are made exact: what is left is the variance of queueing, not of the inputs.
    sizes, gaps = sizes / sizes.mean(), rng.exponential(1, count)
    found = simulate(fleet(), requests(sizes, np.cumsum(gaps / gaps.mean() / rate))).ttft_s
    expected = open_loop_mean_s(rate, 1.0, 1.0)
    assert abs(found.mean() - expected) <= max(0.01 * expected, batch_interval(found))
    assert batch_interval(found) < 0.05 * expected


def mean_value_analysis(clients: int, service_s: float, delay_s: float) -> float:
    """Exact throughput of one sharing station and a delay, for `clients` clients (Reiser and Lavenberg, 1980)."""
    queue = rate = 0.0
    for n in range(1, clients + 1):
        stay = service_s * (1 + queue)
        rate = n / (delay_s + stay)
        queue = rate * stay
    return rate


def closed(clients: int, rounds: int, think_s: float, seed: int) -> tuple[SimRequests, int]:
    total = clients * rounds
    sizes = np.random.default_rng(seed).exponential(1, total)
    arrival = np.full(total, np.inf)
    arrival[:clients] = 0.0
    follows = np.arange(clients, total + clients)
    follows[total - clients :] = -1
    return requests(sizes, arrival, follows=follows, think_s=think_s), total


def steady_rate(outcome: Outcome, total: int) -> float:
    ends = np.sort(outcome.end_s)[total // 5 : -total // 20]
    return (len(ends) - 1) / float(ends[-1] - ends[0])


@pytest.mark.parametrize("clients", [1, 3, 6, 20])
def test_closed_loop_is_mean_value_analysis_and_below_its_bounds(clients: int) -> None:
    think_s, rounds = 4.0, 60_000 // clients
    asked, total = closed(clients, rounds, think_s, seed=clients)
    outcome = simulate(fleet(), asked)
    rate = steady_rate(outcome, total)
    expected = mean_value_analysis(clients, 1.0, think_s)
    gaps = np.diff(np.sort(outcome.end_s)[total // 5 : -total // 20])
    assert abs(rate - expected) <= max(0.01 * expected, batch_interval(gaps) * expected**2)
    assert rate <= closed_loop_requests_per_s(clients, 1.0, 1.0, think_s=think_s) * 1.01


def test_littles_law() -> None:
    clients, think_s = 8, 3.0
    asked, total = closed(clients, 5000, think_s, seed=9)
    outcome = simulate(fleet(), asked)
    rate = steady_rate(outcome, total)
    ttft = float(outcome.ttft_s[total // 5 :].mean())
    assert concurrency_of(rate, ttft, 1, 0.0, think_s) == pytest.approx(clients, rel=0.01)


def test_nodes_share_an_array_and_keep_their_own_drives() -> None:
    array = SourceRate(node_rate=6.0, total_rate=10.0)
    asked = requests([60.0, 60.0], node=[0, 1])
    assert simulate(fleet(array, nodes=2), asked).ttft_s == pytest.approx([12.0, 12.0])
    alone = requests([60.0, 60.0], [0.0, 100.0], node=[0, 1])
    assert simulate(fleet(array, nodes=2), alone).ttft_s == pytest.approx([10.0, 10.0])
    local = SourceRate(node_rate=6.0)
    assert simulate(fleet(local, nodes=2), asked).ttft_s == pytest.approx([10.0, 10.0])


def test_a_share_grows_when_another_node_ends() -> None:
    array = SourceRate(node_rate=10.0, total_rate=10.0)
    found = simulate(fleet(array, nodes=2), requests([10.0, 40.0], node=[0, 1]))
    assert found.ttft_s == pytest.approx([2.0, 5.0])
    assert found.busy_s[:, 0] == pytest.approx([2.0, 5.0])


def test_a_request_restores_from_all_its_sources_at_once() -> None:
    found = simulate(fleet(SourceRate(10.0), SourceRate(5.0)), requests(np.array([[100.0, 20.0], [0.0, 5.0]])))
    assert found.ttft_s == pytest.approx([10.0, 2.0])


def test_staging_bounds_what_is_in_flight_and_a_large_request_goes_alone() -> None:
    found = simulate(fleet(staging_bytes=10.0), requests([10.0, 5.0, 5.0, 30.0]))
    assert found.ttft_s == pytest.approx([10.0, 20.0, 20.0, 50.0])
    free = simulate(fleet(), requests([10.0, 5.0, 5.0, 30.0]))
    assert free.ttft_s.max() == pytest.approx(50.0)
    assert free.ttft_s[0] > 10.0


def test_prefill_is_one_after_another_and_overlaps_the_next_restore() -> None:
    found = simulate(fleet(order="arrival"), requests([2.0, 2.0, 2.0], prefill_s=5.0))
    assert found.ttft_s == pytest.approx([7.0, 12.0, 17.0])


def test_decode_slows_with_the_batch() -> None:
    found = simulate(fleet(), requests([0.0, 0.0], [0.0, 0.5], output=101))
    # 0.01 s per token alone, 0.02 s when two decode: 50 tokens alone, then 50 together, then the other's last 50.
    assert found.end_s == pytest.approx([0.5 + 1.0, 0.5 + 1.0 + 0.5])


def test_sequences_beyond_the_limit_wait() -> None:
    found = simulate(fleet(max_sequences=1), requests([2.0, 2.0], prefill_s=1.0))
    assert found.ttft_s == pytest.approx([3.0, 6.0])


def test_the_same_requests_give_the_same_outcome() -> None:
    sizes = np.random.default_rng(3).exponential(1, 500)
    arrival = np.sort(np.random.default_rng(4).uniform(0, 500, 500))
    one, two = (simulate(fleet(order="shortest"), requests(sizes, arrival)) for _ in range(2))
    assert one.end_s.tolist() == two.end_s.tolist()
