"""What a pool asks its drives for, and when: order, cancelling, release. The drives answer when the test says so."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.tiers.held import HeldStore

from rewarm.store.contract import Outcome, Transfer
from rewarm.testing import make_keys
from rewarm.testing.kit.base import WAIT_S, assert_hits_are_right, destinations, finish, save
from rewarm.tiers.lane import SLICES_PER_WINDOW, WINDOW_BYTES_START
from rewarm.tiers.pool import PoolSettings, PoolStore

BLOCK = 1 << 20
SLICE = WINDOW_BYTES_START // SLICES_PER_WINDOW // BLOCK
"""Blocks that a drive of unknown speed is asked for in one batch."""


@pytest.fixture
def drive() -> HeldStore:
    return HeldStore()


@pytest.fixture
def pool(drive: HeldStore) -> Iterator[PoolStore]:
    with PoolStore([("only", drive)]) as pool:
        yield pool
        while drive.held():
            drive.let_go()


def start(pool: PoolStore, keys: list[bytes]) -> tuple[Transfer, np.ndarray]:
    """Save blocks and begin to load them."""
    assert save(pool, keys, BLOCK) == [Outcome.STORED] * len(keys)
    buffers = destinations(len(keys), BLOCK)
    return pool.load(keys, buffers), buffers


def in_order(drive: HeldStore) -> list[bytes]:
    """Keys in the order in which the drive was asked for them."""
    return [key for batch in drive.asked for key in batch]


def test_a_drive_is_asked_for_one_window_at_a_time(pool: PoolStore, drive: HeldStore) -> None:
    keys = make_keys(10 * SLICE)
    transfer, buffers = start(pool, keys)
    for served in range(SLICES_PER_WINDOW):  # then the speed is known, and the window follows it
        drive.wait_for(served + SLICES_PER_WINDOW)
        assert len(drive.asked) == served + SLICES_PER_WINDOW
        drive.serve()
    drive.serve_until(transfer)
    assert finish(transfer) == [True] * len(keys)
    assert_hits_are_right(keys, buffers, transfer.outcomes)
    assert in_order(drive) == keys


def test_a_short_request_goes_before_the_rest_of_a_long_one(pool: PoolStore, drive: HeldStore) -> None:
    long, short = make_keys(8 * SLICE, "long"), make_keys(SLICE, "short")
    first, _ = start(pool, long)
    drive.wait_for(SLICES_PER_WINDOW)
    second, _ = start(pool, short)
    drive.serve_until(first, second)
    assert finish(first) == [True] * len(long)
    assert finish(second) == [True] * len(short)
    asked = in_order(drive)
    sent_before = SLICES_PER_WINDOW * SLICE
    assert asked[sent_before : sent_before + SLICE] == short
    assert [key for key in asked if key not in short] == long


def test_arrival_order_serves_the_long_one_first() -> None:
    drive = HeldStore()
    with PoolStore([("only", drive)], PoolSettings(ageing=0.0)) as pool:
        first, _ = start(pool, make_keys(8 * SLICE, "long"))
        drive.wait_for(SLICES_PER_WINDOW)
        short = make_keys(SLICE, "short")
        second, _ = start(pool, short)
        drive.serve_until(first, second)
        assert finish(first) == [True] * 8 * SLICE
        assert finish(second) == [True] * SLICE
        assert in_order(drive)[8 * SLICE :] == short


def test_cancelling_stops_at_once_what_was_not_sent(pool: PoolStore, drive: HeldStore) -> None:
    transfer, buffers = start(pool, make_keys(10 * SLICE))
    drive.wait_for(SLICES_PER_WINDOW)
    transfer.cancel()
    assert set(transfer.outcomes) == {Outcome.CANCELLED}
    assert not transfer.wait_released(0.05), "a drive still holds its memory"
    assert pool.stats().unreleased_bytes == buffers.nbytes
    for _ in range(SLICES_PER_WINDOW):
        drive.let_go()
    assert transfer.wait_released(WAIT_S)
    assert len(drive.asked) == SLICES_PER_WINDOW
    assert pool.stats().unreleased_bytes == 0


def test_a_time_out_gives_verdicts_and_keeps_what_is_there(pool: PoolStore, drive: HeldStore) -> None:
    keys = make_keys(10 * SLICE)
    transfer, buffers = start(pool, keys)
    drive.wait_for(SLICES_PER_WINDOW)
    drive.serve()
    drive.wait_for(SLICES_PER_WINDOW + 1)
    good = transfer.wait(0)
    assert good == [True] * SLICE + [False] * 9 * SLICE
    assert set(transfer.outcomes[SLICE:]) == {Outcome.TIMED_OUT}
    while drive.held():
        drive.let_go()
    assert transfer.wait_released(WAIT_S)
    assert_hits_are_right(keys, buffers, transfer.outcomes)


def test_the_next_request_is_served_after_one_was_cancelled(pool: PoolStore, drive: HeldStore) -> None:
    first, _ = start(pool, make_keys(10 * SLICE, "first"))
    drive.wait_for(SLICES_PER_WINDOW)
    keys = make_keys(2 * SLICE, "second")
    second, buffers = start(pool, keys)
    first.cancel()
    for _ in range(SLICES_PER_WINDOW):
        drive.let_go()
    drive.wait_for(SLICES_PER_WINDOW + 2)
    drive.serve()
    drive.serve()
    assert finish(second) == [True] * len(keys)
    assert_hits_are_right(keys, buffers, second.outcomes)


def test_many_requests_share_one_thread_and_few_descriptors(pool: PoolStore, drive: HeldStore) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    transfers = [start(pool, make_keys(2, f"{index}"))[0] for index in range(100)]
    drive.wait_for(1)
    assert threading.active_count() <= threads + 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors + WINDOW_BYTES_START // BLOCK + 4
    drive.serve_until(*transfers)
    assert [finish(transfer) for transfer in transfers] == [[True, True]] * 100


def test_media_say_what_waits_before_a_request_of_a_size(pool: PoolStore, drive: HeldStore) -> None:
    """A window is being served; of the rest, a small new request goes before it and a larger one behind it."""
    assert pool.media()[0].queue.ahead_bytes(np.array([BLOCK])).tolist() == [0]
    keys = make_keys(10 * SLICE)
    transfer, _ = start(pool, keys)
    drive.wait_for(SLICES_PER_WINDOW)
    window, rest = WINDOW_BYTES_START, 6 * SLICE * BLOCK
    (medium,) = pool.media()
    assert medium.bytes_per_s == math.inf, "not measured yet"
    assert medium.queue.ahead_bytes(np.array([BLOCK, rest])).tolist() == [window, window + rest]
    drive.serve_until(transfer)
    assert pool.places([*keys[:2], b"never saved"]).tolist() == [0, 0, -1]
