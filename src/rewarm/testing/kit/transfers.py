"""Verdict and release: waiting, time-outs, cancelling, the eventfd."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import threading

from rewarm.store.contract import Outcome, Transfer
from rewarm.testing.kit.base import (
    BLOCK_BYTES,
    WAIT_S,
    StoreKit,
    assert_hits_are_right,
    blocks_of,
    destinations,
    finish,
    load,
    save,
)
from rewarm.testing.payload import make_keys

MANY = 256


def _readable(transfer: Transfer, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(transfer.fileno(), select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


class TransferTests(StoreKit):
    """Verdict and release."""

    def test_waiting_again_gives_the_same_answer(self) -> None:
        store, keys = self.open(), make_keys(4)
        save(store, keys[:2])
        transfer = store.load(keys, destinations(4))
        assert finish(transfer) == [True, True, False, False]
        transfer.cancel()
        assert transfer.wait() == transfer.wait(0) == [True, True, False, False]
        assert transfer.outcomes == [Outcome.HIT] * 2 + [Outcome.MISSING] * 2

    def test_the_eventfd_tells_that_a_load_is_done(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        save(store, keys)
        transfer = store.load(keys, destinations(MANY))
        assert _readable(transfer, WAIT_S)
        assert transfer.done()
        assert transfer.wait(0) == [True] * MANY

    def test_the_eventfd_tells_that_a_save_is_done(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        transfer = store.save(keys, blocks_of(keys))
        assert _readable(transfer, WAIT_S)
        assert transfer.done()
        assert transfer.outcomes == [Outcome.STORED] * MANY

    def test_an_eventfd_asked_for_late_is_readable(self) -> None:
        store, keys = self.open(), make_keys(2)
        transfer = store.load(keys, destinations(2))
        finish(transfer)
        assert _readable(transfer, 0)
        assert transfer.fileno() == transfer.fileno()
        assert fcntl.fcntl(transfer.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert _readable(store.load([], []), 0)

    def test_eventfds_go_with_their_transfers(self) -> None:
        store, keys = self.open(), make_keys(1)
        save(store, keys)
        before = len(os.listdir("/proc/self/fd"))
        transfers = [store.load(keys, destinations(1)) for _ in range(50)]
        for transfer in transfers:
            assert _readable(transfer, WAIT_S)
            finish(transfer)
        del transfers, transfer
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before + 5

    def test_a_wait_that_times_out_gives_a_verdict(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        save(store, keys)
        buffers = destinations(MANY)
        transfer = store.load(keys, buffers)
        good = transfer.wait(0)
        assert transfer.done()
        outcomes = transfer.outcomes
        assert set(outcomes) <= {Outcome.HIT, Outcome.TIMED_OUT}
        assert good == [outcome is Outcome.HIT for outcome in outcomes]
        assert transfer.wait_released(WAIT_S)
        assert transfer.outcomes == outcomes, "a verdict is final"
        assert_hits_are_right(keys, buffers, outcomes)
        assert load(store, keys) == [Outcome.HIT] * MANY

    def test_cancelling_a_load(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        save(store, keys)
        buffers = destinations(MANY)
        transfer = store.load(keys, buffers)
        transfer.cancel()
        assert transfer.done()
        outcomes = transfer.outcomes
        assert set(outcomes) <= {Outcome.HIT, Outcome.CANCELLED}
        assert transfer.wait() == [outcome is Outcome.HIT for outcome in outcomes]
        assert transfer.wait_released(WAIT_S)
        before = buffers.copy()
        assert_hits_are_right(keys, buffers, outcomes)
        assert load(store, keys) == [Outcome.HIT] * MANY
        assert (buffers == before).all(), "memory was written after its release"

    def test_cancelling_a_save(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        transfer = store.save(keys, blocks_of(keys))
        transfer.cancel()
        assert transfer.done()
        outcomes = transfer.outcomes
        assert set(outcomes) <= {Outcome.STORED, Outcome.CANCELLED}
        assert transfer.wait_released(WAIT_S)
        stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.STORED]
        assert load(store, stored) == [Outcome.HIT] * len(stored)
        assert set(save(store, keys)) <= {Outcome.STORED, Outcome.ALREADY}
        assert load(store, keys) == [Outcome.HIT] * MANY

    def test_many_transfers_at_once(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        saving = [store.save([key], blocks_of([key])) for key in keys]
        assert [finish(transfer) for transfer in reversed(saving)] == [[True]] * MANY
        buffers = destinations(MANY)
        loading = [store.load([key], [row]) for key, row in zip(keys, buffers, strict=True)]
        assert [finish(transfer) for transfer in reversed(loading)] == [[True]] * MANY
        assert [row.tobytes() for row in buffers] == blocks_of(keys)

    def test_several_threads_may_wait_for_one_transfer(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        save(store, keys)
        transfer = store.load(keys, destinations(MANY))
        answers: list[list[bool]] = []
        threads = [threading.Thread(target=lambda: answers.append(transfer.wait(WAIT_S))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert answers == [[True] * MANY] * 4

    def test_queued_saves_are_finished_by_close(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        transfer = store.save(keys, blocks_of(keys))
        store.close()
        assert transfer.done()
        assert transfer.wait(0) == [True] * MANY
        assert transfer.released()

    def test_loads_under_way_end_with_close(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        save(store, keys)
        buffers = destinations(MANY)
        transfer = store.load(keys, buffers)
        store.close()
        assert transfer.done()
        assert set(transfer.outcomes) <= {Outcome.HIT, Outcome.CANCELLED}
        assert transfer.wait_released(WAIT_S)
        assert_hits_are_right(keys, buffers, transfer.outcomes)

    def test_flush_waits_for_what_was_saved(self) -> None:
        store, keys = self.open(), make_keys(MANY)
        transfer = store.save(keys, blocks_of(keys))
        store.flush()
        assert transfer.done()
        assert transfer.outcomes == [Outcome.STORED] * MANY
        assert store.stats().queued_bytes == 0

    def test_a_transfer_holds_its_own_size(self) -> None:
        store, keys = self.open(), make_keys(3)
        assert len(store.save(keys, blocks_of(keys)).outcomes) == 3
        assert len(store.load(keys, destinations(3, BLOCK_BYTES)).outcomes) == 3
