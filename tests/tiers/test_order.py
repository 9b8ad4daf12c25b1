"""The order of restores, in a model of one medium: the ageing bound, and when the requests of a wave end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.geometry import all_at_once, arrival_order, shortest_first
from rewarm.tiers.order import AGEING, RestoreOrder

SLICE = 10

HIT_TOKENS = (
    1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1536, 1536, 1536, 1536, 2048, 2048, 2048, 2048, 2560, 2560, 3072,
    3072, 3072, 3584, 3584, 4096, 4096, 4096, 4608, 4608, 5120, 5120, 5632, 5632, 6144, 6144, 6656, 6656, 7168, 7680,
    8192, 8192, 8704, 9216, 9728, 10240, 10752, 11776, 12288, 13312, 13824, 14848, 15360, 16384, 17408, 18432, 19456,
    20992, 23552, 25088, 27136, 29184, 32768, 41004, 57268, 82236,
)  # fmt: skip
"""Quantiles of what 4,658 requests of Mooncake's conversation trace (FAST'25) find in an infinite cache beyond the
first block, which nearly all share."""


@dataclass(eq=False)
class Request:
    """A request of the model; `overtaken` counts bytes served to others that came later."""

    number: int
    size_bytes: int
    remaining_bytes: int = field(init=False)
    overtaken: int = 0
    end: int = -1

    def __post_init__(self) -> None:
        self.remaining_bytes = self.size_bytes

    @property
    def unsent_bytes(self) -> int:
        """On the only medium."""
        return self.remaining_bytes


def serve(sizes: list[int], arrivals: list[int], ageing: float, slice_bytes: int = SLICE) -> list[Request]:
    """Serve requests that arrive when so many bytes were served (or the medium is idle); one byte per unit of time."""
    order: RestoreOrder[Request] = RestoreOrder(ageing)
    requests = [Request(number, size) for number, size in enumerate(sizes)]
    coming = sorted(zip(arrivals, requests, strict=True), key=lambda pair: (pair[0], pair[1].number))
    now = 0
    while coming or len(order):
        if not len(order):
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            order.add(coming.pop(0)[1])
        waiting = list(order)
        chosen = order.next(slice_bytes)
        assert chosen is not None
        count = min(slice_bytes, chosen.remaining_bytes)
        order.served(chosen, count)
        for request in waiting[: waiting.index(chosen)]:
            request.overtaken += count
        chosen.remaining_bytes -= count
        now += count
        if not chosen.remaining_bytes:
            order.remove(chosen)
            chosen.end = now
    return requests


@given(
    load=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2000)), min_size=1, max_size=30),
    ageing=st.sampled_from([0.0, 0.5, 1.0, AGEING]),
)
def test_nobody_is_overtaken_by_more_than_the_bound_times_its_size(load: list[tuple[int, int]], ageing: float) -> None:
    sizes, arrivals = [size for size, _ in load], [at for _, at in load]
    for request in serve(sizes, arrivals, ageing):
        assert request.overtaken <= ageing * request.size_bytes
        assert request.end > 0


@given(load=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2000)), min_size=1, max_size=30))
def test_the_medium_is_never_idle_while_somebody_waits(load: list[tuple[int, int]]) -> None:
    sizes, arrivals = [size for size, _ in load], [at for _, at in load]
    ends = [max(r.end for r in serve(sizes, arrivals, ageing)) for ageing in (0.0, 1.0, AGEING)]
    assert len(set(ends)) == 1


def test_a_large_request_is_served_under_a_stream_of_small_ones() -> None:
    small = 2000
    requests = serve([500] + [40] * small, [0] + [30 * turn for turn in range(small)], AGEING)
    assert requests[0].end <= 500 + AGEING * 500 + 40
    unbounded = serve([500] + [40] * small, [0] + [30 * turn for turn in range(small)], 1e6)
    assert unbounded[0].end > 10 * requests[0].end, "the stream would starve it without the bound"


def test_arrival_order_serves_one_after_another() -> None:
    sizes = [300, 20, 100, 50]
    ends = [request.end for request in serve(sizes, [0] * 4, 0.0)]
    assert ends == arrival_order(sizes, 1.0).tolist()


def test_shortest_first_is_the_closed_form_where_the_bound_does_not_bite() -> None:
    sizes = [300, 20, 100, 50]
    ends = [request.end for request in serve(sizes, [0] * 4, AGEING, slice_bytes=1)]
    assert ends == shortest_first(sizes, 1.0).tolist()


def test_a_shorter_request_that_comes_later_goes_first() -> None:
    long, short = serve([1000, 50], [0, 100], AGEING)
    assert short.end == 150
    assert long.end == 1050


def test_a_request_under_way_is_not_given_up_for_an_equal_one() -> None:
    ends = [request.end for request in serve([100] * 4, [0, 15, 25, 35], AGEING)]
    assert ends == [100, 200, 300, 400]


def test_a_wave_of_equal_requests_halves_the_median() -> None:
    sizes = [1000] * 32
    ends = np.array([request.end for request in serve(sizes, [0] * 32, AGEING)])
    assert np.median(ends) <= 0.6 * ends.max()
    assert ends.max() <= all_at_once(sizes, 1.0).max()


@pytest.mark.parametrize("seed", range(5))
def test_the_median_of_a_wave_of_trace_sizes(seed: int) -> None:
    sizes = np.random.default_rng(seed).choice(HIT_TOKENS, 32).tolist()
    ends = np.array([request.end for request in serve(sizes, [0] * len(sizes), AGEING, slice_bytes=256)])
    shared = all_at_once(sizes, 1.0)
    assert np.median(ends) <= 0.5 * np.median(shared)
    assert ends.max() <= shared.max()


@pytest.mark.parametrize("ageing", [-1.0, float("nan"), float("inf")])
def test_a_bad_bound_is_refused(ageing: float) -> None:
    with pytest.raises(ConfigError, match="ageing"):
        RestoreOrder(ageing)
