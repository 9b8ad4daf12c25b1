"""Transfers: one verdict for each block, one release, whoever comes first; nobody who waits is forgotten."""

from __future__ import annotations

import os
import random
import select
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rewarm.store.contract import GOOD_OUTCOMES, Outcome
from rewarm.store.transfer import BatchTransfer, Counters, settled_transfer

WAIT_S = 30.0


class Caller:
    """Calls something in a thread of its own, and gives back what it returned."""

    def __init__(self, call: object, *arguments: object) -> None:
        self._call, self._arguments = call, arguments
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.answer = self._call(*self._arguments)  # type: ignore[operator]

    def join(self) -> object:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "it waits for ever"
        return self.answer


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_a_block_is_settled_once(counters: Counters) -> None:
    transfer = BatchTransfer(3, counters, loading=True)
    transfer.settle([0], Outcome.HIT)
    transfer.settle([0, 1], Outcome.CORRUPT)
    assert transfer.outcomes == [Outcome.HIT, Outcome.CORRUPT, None]
    assert transfer.pending().tolist() == [2]
    assert not transfer.done()
    transfer.cancel()
    transfer.settle([0, 1, 2], Outcome.HIT)
    assert transfer.outcomes == [Outcome.HIT, Outcome.CORRUPT, Outcome.CANCELLED]
    assert counters.hits == 1
    assert counters.misses()["corrupt"] == counters.misses()["cancelled"] == 1
    assert transfer.wait(0) == [True, False, False]


def test_a_timeout_is_a_verdict_and_what_comes_later_is_none(counters: Counters) -> None:
    woken = []
    transfer = BatchTransfer(2, counters, loading=True, wake=lambda: woken.append(True))
    transfer.settle([1], Outcome.HIT)
    assert transfer.wait(0.0) == [False, True]
    assert woken, "the loop is told, so that it drops what is not in the kernel"
    transfer.settle([0, 1], Outcome.HIT)
    assert transfer.outcomes == [Outcome.TIMED_OUT, Outcome.HIT]
    assert not transfer.released()


def test_release_comes_from_the_loop_alone(counters: Counters) -> None:
    transfer = BatchTransfer(2, counters, loading=False)
    transfer.cancel()
    assert transfer.done()
    assert not transfer.wait_released(0.0)
    transfer.release()
    assert transfer.released()
    assert transfer.wait_released()


def test_a_release_settles_what_is_left(counters: Counters) -> None:
    transfer = BatchTransfer(2, counters, loading=True)
    transfer.settle([0], Outcome.HIT)
    transfer.release()
    assert transfer.outcomes == [Outcome.HIT, Outcome.CANCELLED]


def test_the_last_verdicts_can_come_with_the_release(counters: Counters) -> None:
    transfer = BatchTransfer(2, counters, loading=True)
    waiting = Caller(transfer.wait_released)
    transfer.settle([0, 1], Outcome.HIT, releasing=True)
    assert waiting.join() is True
    assert transfer.wait(0) == [True, True]


def test_who_waits_for_the_release_is_woken_though_a_timeout_came_first(counters: Counters) -> None:
    transfer = BatchTransfer(1, counters, loading=True)
    transfer.wait(0.0)
    waiting = Caller(transfer.wait_released)
    while not transfer._condition._waiters:  # type: ignore[attr-defined]
        pass
    transfer.settle([0], Outcome.HIT, releasing=True)
    assert waiting.join() is True
    assert transfer.outcomes == [Outcome.TIMED_OUT]


@pytest.mark.parametrize("early", [True, False])
def test_the_eventfd_is_readable_once_all_is_settled(counters: Counters, early: bool) -> None:
    transfer = BatchTransfer(2, counters, loading=True)
    number = transfer.fileno() if early else -1
    transfer.settle([0], Outcome.HIT)
    if early:
        assert select.select([number], [], [], 0)[0] == []
    transfer.settle([1], Outcome.MISSING)
    assert select.select([transfer.fileno()], [], [], 0)[0] == [transfer.fileno()]
    assert not os.get_inheritable(transfer.fileno())
    number = transfer.fileno()
    del transfer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_an_empty_transfer_is_over(counters: Counters) -> None:
    transfer = BatchTransfer(0, counters, loading=True)
    assert transfer.done()
    assert transfer.wait() == []
    assert transfer.outcomes == []


@pytest.mark.parametrize("outcome", list(Outcome))
def test_true_is_a_good_outcome(counters: Counters, outcome: Outcome) -> None:
    transfer = settled_transfer(2, outcome, counters, loading=False)
    assert transfer.wait() == [outcome in GOOD_OUTCOMES] * 2
    assert transfer.released()
    assert transfer.outcomes == [outcome] * 2


def settle_in_pieces(transfer: BatchTransfer, outcome: Outcome, pieces: Iterator[np.ndarray]) -> None:
    for piece in pieces:
        transfer.settle(piece, outcome)


@pytest.mark.parametrize("seed", range(8))
def test_threads_that_settle_the_same_blocks_count_each_once(counters: Counters, seed: int) -> None:
    count, dice = 500, random.Random(seed)
    transfer = BatchTransfer(count, counters, loading=True)
    waiting = [Caller(transfer.wait) for _ in range(2)] + [Caller(transfer.wait_released)]
    number = transfer.fileno()
    settling = []
    for outcome in (Outcome.HIT, Outcome.CORRUPT, Outcome.MISSING):
        order = np.array(dice.sample(range(count), count), np.int64)
        settling.append(Caller(settle_in_pieces, transfer, outcome, iter(np.array_split(order, 50))))
    if seed % 2:
        transfer.cancel()
    for caller in settling:
        caller.join()
    transfer.release()
    answers = [caller.join() for caller in waiting]
    assert answers[0] == answers[1] == [outcome is Outcome.HIT for outcome in transfer.outcomes]
    assert counters.hits == transfer.outcomes.count(Outcome.HIT)
    assert counters.hits + sum(counters.misses().values()) == count
    assert select.select([number], [], [], 0)[0] == [number]


def test_counters_keep_budget_together(counters: Counters) -> None:
    assert counters.reserve(60, 100)
    assert not counters.reserve(41, 100)
    assert counters.reserve(40, 100)
    counters.add(queued_bytes=-100, bytes_read=5)
    assert (counters.queued_bytes, counters.bytes_read) == (0, 5)
    callers = [Caller(lambda: [counters.add(bytes_log=1) for _ in range(2000)]) for _ in range(4)]
    for caller in callers:
        caller.join()
    assert counters.bytes_log == 8000
