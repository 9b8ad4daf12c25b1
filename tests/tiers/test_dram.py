"""The bounded region: never exceeded, never failing, never a wait for ever; and restores that pass through it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers.held import WAIT_S, HeldStore

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.contract import Outcome
from rewarm.store.memory import MemoryStore
from rewarm.testing import make_keys, payload
from rewarm.testing.kit.base import save
from rewarm.tiers.dram import Region, Ticket
from rewarm.tiers.staging import Staging

BLOCK = 4096


class Destination:
    """Where the blocks of one request go."""

    def __init__(self, count: int) -> None:
        self.memory = np.zeros((count, BLOCK), np.uint8)
        self.deliveries: list[list[int]] = []

    def deliver(self, positions: list[int], blocks: npt.NDArray[np.uint8]) -> None:
        """Copy."""
        self.deliveries.append(positions)
        self.memory[positions] = blocks


def test_a_region_is_whole_blocks_of_one_mapping() -> None:
    region = Region(10 * BLOCK + 17, BLOCK)
    assert region.memory.shape == (10, BLOCK)
    assert region.memory.flags.c_contiguous
    assert region.memory.__array_interface__["data"][0] % 4096 == 0
    assert region.register(MemoryStore()) == 0
    with pytest.raises(ConfigError, match=f"set at least {BLOCK}"):
        Region(BLOCK - 1, BLOCK)
    with pytest.raises(ConfigError):
        Region(BLOCK, 0)


def test_the_first_to_ask_is_the_first_to_be_served() -> None:
    region = Region(8 * BLOCK, BLOCK)
    first, large, small = region.ask(6), region.ask(8), region.ask(1)
    assert first.wait(0)
    assert not large.wait(0)
    assert not small.wait(0), "else a stream of small ones would starve the large one"
    assert region.stats().waiting == 2
    first.release()
    first.release()
    assert large.wait(0)
    assert not small.wait(0)
    large.release()
    assert small.wait(0)
    assert region.stats().used_bytes == BLOCK
    assert region.stats().used_bytes_max == 8 * BLOCK


def test_a_ticket_that_stops_waiting_lets_others_pass() -> None:
    region = Region(4 * BLOCK, BLOCK)
    with region.ask(3), region.ask(4) as large, region.ask(1) as small:
        large.release()
        assert not large.wait()
        assert small.wait(0)
    assert region.stats().used_bytes == 0
    with pytest.raises(MisuseError, match="1 to 4"):
        region.ask(5)
    with pytest.raises(MisuseError):
        region.ask(0)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=60))
def test_rows_are_never_given_twice_and_never_too_many(steps: list[tuple[bool, int]]) -> None:
    region = Region(8 * BLOCK, BLOCK)
    tickets: list[Ticket] = []
    for asking, number in steps:
        if asking:
            tickets.append(region.ask(number))
        elif tickets:
            tickets.pop(number % len(tickets)).release()
        given_out = [row for ticket in tickets if ticket.rows is not None for row in ticket.rows.tolist()]
        assert len(given_out) == len(set(given_out)) <= 8
        waiting = [ticket for ticket in tickets if ticket.rows is None]
        free = 8 - len(given_out)
        assert not waiting or waiting[0].blocks > free, "somebody waits for what is free"
    for ticket in tickets:
        ticket.release()
    assert region.stats().used_bytes == 0


def test_thirty_two_requests_through_a_region_of_one() -> None:
    count = 24
    region, store = Region(count * BLOCK, BLOCK), MemoryStore()
    staging = Staging(region, store)
    requests = [make_keys(count, f"{number}") for number in range(32)]
    for keys in requests:
        save(store, keys, BLOCK)

    def restore(keys: list[bytes]) -> npt.NDArray[np.uint8]:
        destination = Destination(count)
        assert staging.restore(keys, destination.deliver, WAIT_S) == [Outcome.HIT] * count
        return destination.memory

    with ThreadPoolExecutor(32) as pool:
        for keys, memory in zip(requests, pool.map(restore, requests), strict=True):
            assert [row.tobytes() for row in memory] == [payload(key, BLOCK) for key in keys]
    stats = region.stats()
    assert stats.used_bytes_max <= stats.region_bytes
    assert (stats.used_bytes, stats.waiting) == (0, 0)


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_a_request_larger_than_the_region_passes_in_pieces(blocks: int) -> None:
    region, store, keys = Region(blocks * BLOCK, BLOCK), MemoryStore(), make_keys(50)
    save(store, keys[::2], BLOCK)
    destination = Destination(50)
    outcomes = Staging(region, store).restore(keys, destination.deliver)
    assert outcomes == [Outcome.HIT, Outcome.MISSING] * 25
    for key, row in zip(keys[::2], destination.memory[::2], strict=True):
        assert row.tobytes() == payload(key, BLOCK)
    assert not destination.memory[1::2].any()
    assert region.stats().used_bytes == 0


def test_the_next_piece_is_read_while_one_is_delivered() -> None:
    region, store, keys = Region(4 * BLOCK, BLOCK), HeldStore(), make_keys(6)
    save(store, keys, BLOCK)
    asked_then: list[int] = []
    thread, outcomes = _start(
        Staging(region, store), keys, lambda positions, blocks: asked_then.append(len(store.asked))
    )
    for batches in (1, 2, 3):
        store.wait_for(batches)
        store.serve()
    thread.join(WAIT_S)
    assert outcomes == [Outcome.HIT] * 6
    assert asked_then == [2, 3, 3]


def test_memory_that_a_store_holds_is_not_given_to_others() -> None:
    region, store, keys = Region(4 * BLOCK, BLOCK), HeldStore(), make_keys(4)
    save(store, keys, BLOCK)
    destination = Destination(4)
    assert Staging(region, store).restore(keys, destination.deliver, 0.05) == [Outcome.TIMED_OUT] * 4
    assert not destination.memory.any()
    assert region.stats().used_bytes == 2 * BLOCK
    other = region.ask(4)
    assert not other.wait(0.05)
    store.let_go()
    assert other.wait(WAIT_S), "nobody but the waiting one looks"
    other.release()
    assert region.stats().used_bytes == 0


def test_a_destination_that_raises_leaves_nothing_behind() -> None:
    region, store, keys = Region(4 * BLOCK, BLOCK), MemoryStore(), make_keys(12)
    save(store, keys, BLOCK)

    def fail(positions: list[int], blocks: npt.NDArray[np.uint8]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Staging(region, store).restore(keys, fail)
    store.close()
    with pytest.raises(MisuseError):
        Staging(region, MemoryStore()).restore([b"short"], fail)
    assert region.stats().used_bytes == 0


def test_many_threads_ask_and_release() -> None:
    region = Region(16 * BLOCK, BLOCK)
    owners = np.zeros(16, np.int64)

    def work(number: int) -> None:
        dice = random.Random(number)
        for _ in range(50):
            with region.ask(dice.randint(1, 16)) as ticket:
                assert ticket.wait(WAIT_S)
                assert not owners[ticket.rows].any()
                owners[ticket.rows] = number
                owners[ticket.rows] = 0

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(1, 9)]:
            future.result(WAIT_S)
    assert region.stats().used_bytes == 0


def test_what_must_be_in_flight_against_what_fits() -> None:
    region = Region(10 << 20, 1 << 20)
    enough = region.fit(1 << 20, 8)
    assert (enough.needed_bytes, enough.advice) == (8 << 20, "")
    short = region.fit(4 << 20, 32)
    assert short.requests_at_once == 2.5
    assert "set 134217728 bytes" in short.advice


def _start(
    staging: Staging, keys: list[bytes], deliver: Callable[[list[int], npt.NDArray[np.uint8]], None]
) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(staging.restore(keys, deliver, WAIT_S)))
    thread.start()
    return thread, outcomes
