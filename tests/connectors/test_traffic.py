"""Jobs between rows and a store: verdicts, release, deadlines, failed keys, budgets."""

from __future__ import annotations

import errno
import logging
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rewarm.connectors.vllm.rows import Rows
from rewarm.connectors.vllm.traffic import Finished, Limits, Traffic
from rewarm.errors import ConfigError
from rewarm.store.devices.base import READ, Device
from rewarm.store.file import FileStore
from rewarm.store.opening import open_store
from rewarm.testing.faulty import FaultyDevice, failure, stall

ROW = 8192
COUNT = 16
KEYS = [bytes([number]) * 36 for number in range(COUNT)]


class Bench:
    """A store on a directory behind a device that can fail, rows, and the traffic between them."""

    def __init__(
        self, pool: Path, *, copies: int = 1, promotion: int = COUNT, save: int = COUNT, deadline_s: float = 20
    ) -> None:
        # Whole pages, as vLLM's region: the kernel reads into them directly.
        self.memory = np.frombuffer(mmap.mmap(-1, COUNT * ROW), np.uint8).reshape(COUNT, ROW)
        self.rows = Rows(memoryview(self.memory), copies=copies, part_bytes=ROW // copies)
        self.devices: list[FaultyDevice] = []
        self.store = open_store(f"file://{pool}?capacity=64MiB", namespace="t", device_wrapper=self._wrap)
        limits = Limits(promotion_rows=promotion, save_rows=save, deadline_s=deadline_s)
        self.traffic = Traffic(self.store, self.rows, limits)

    def _wrap(self, device: Device) -> Device:
        self.devices.append(FaultyDevice(device))
        return self.devices[-1]

    def fill(self, count: int = COUNT) -> None:
        """Put a content of its own into every row and store it."""
        for row in range(count):
            self.memory[row] = row + 1
        self.traffic.save(1, KEYS[:count], list(range(count)))
        assert self.end().good is None

    def end(self) -> Finished:
        """Wait for one job."""
        limit_s = time.monotonic() + 20
        while not (over := self.traffic.finished()):
            self.traffic.end_step()
            assert time.monotonic() < limit_s, "the job never ends"
            time.sleep(0.001)
        assert len(over) == 1
        return over[0]

    def hang(self) -> None:
        """Reads get no answer from now on."""
        for device in self.devices:
            device.chance(stall(), 1.0, opcode=READ)

    def release(self) -> None:
        """They do again."""
        for device in self.devices:
            device.heal()
            device.release_stalled()

    def close(self) -> None:
        """End all."""
        self.release()
        self.traffic.stop(10)
        self.store.close()
        assert self.traffic.wait_released(10)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes benches that end with the test."""
    made: list[Bench] = []

    def make(**options: int) -> Bench:
        made.append(Bench(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_rows_come_back_and_only_they(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.fill()
    one.memory[:] = 0
    one.traffic.load(2, KEYS[3:6], [10, 0, 7])
    ended = one.end()
    assert (ended.job, ended.good, ended.moved_bytes) == (2, None, 3 * ROW)
    assert [int(one.memory[row, 0]) for row in (10, 0, 7)] == [4, 5, 6]
    assert not one.memory[[1, 2, 3, 4, 5, 6, 8, 9, 11]].any()
    assert not one.traffic.busy()


def test_a_key_that_failed_is_a_miss_until_it_is_saved_again(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    one.fill(4)
    for device in one.devices:
        device.chance(failure(errno.EIO), 1.0, opcode=READ)
    with caplog.at_level(logging.WARNING, "vllm.rewarm"):
        one.traffic.load(2, KEYS[:2], [0, 1])
        assert one.end().good == []
        one.traffic.load(3, KEYS[2:3], [2])
        assert one.end().good == []
    one.release()
    assert len(caplog.records) == 1, "counted always, logged once in a while"
    assert one.traffic.failures.counts == {"load lost_medium": 3}
    assert [one.traffic.holds(key) for key in KEYS[:4]] == [False, False, False, True]
    one.traffic.save(4, KEYS[:1], [0])
    assert one.end().good is None
    assert [one.traffic.holds(key) for key in KEYS[:4]] == [True, False, False, True]


def test_part_of_a_load_may_fail(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.fill(2)
    one.traffic.load(2, [KEYS[0], KEYS[9], KEYS[1]], [5, 6, 7])
    assert one.end().good == [KEYS[0], KEYS[1]]
    assert one.traffic.failures.counts == {"load missing": 1}


def test_rows_go_back_only_when_the_kernel_has_let_go(bench: Callable[..., Bench]) -> None:
    one = bench(deadline_s=0.2)
    one.fill(2)
    one.memory[:] = 0
    one.hang()
    one.traffic.load(2, KEYS[:2], [0, 1])
    one.traffic.end_step()
    limit_s = time.monotonic() + 20
    while not one.store.stats().misses["timed_out"]:
        assert one.traffic.finished() == [], "past its deadline and still in the kernel: not over"
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    assert one.traffic.finished() == []
    assert one.traffic.busy()
    one.release()
    assert one.end().good == []
    assert one.traffic.failures.counts == {"load timed_out": 2}
    assert not one.traffic.holds(KEYS[0])


def test_offers_stay_within_the_budget(bench: Callable[..., Bench]) -> None:
    one = bench(promotion=3)
    one.fill()
    assert one.traffic.offers == 3
    one.traffic.offers -= 3
    one.hang()
    one.traffic.load(2, KEYS[:2], [0, 1])
    assert one.traffic.offers == 0
    one.traffic.end_step()
    assert one.traffic.offers == 1, "an offer that led to no load is void, the load counts"
    one.release()
    one.end()
    assert one.traffic.offers == 3


def test_saves_over_the_budget_are_refused_at_once(bench: Callable[..., Bench]) -> None:
    one = bench(save=3)
    one.traffic.save(2, KEYS[:5], list(range(5)))
    assert one.end().good == KEYS[:3]
    assert one.traffic.failures.counts == {"save refused_budget": 2}
    assert [one.traffic.holds(key) for key in KEYS[:5]] == [True, True, True, False, False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_leaves_no_job_waiting(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.store.close()  # misuse: the store's error ends the thread
    one.traffic.load(2, KEYS[:2], [0, 1])
    assert one.end().good == []
    one.traffic.save(3, KEYS[:2], [0, 1])
    assert one.end().good == []
    assert one.traffic.failures.counts == {"load lost_medium": 2, "save lost_medium": 2}


def test_equal_copies_are_stored_once(bench: Callable[..., Bench]) -> None:
    one = bench(copies=4)
    one.fill(2)
    assert isinstance(one.store, FileStore)
    assert one.store.stats().bytes_written == 2 * ROW // 4
    one.memory[:] = 0
    one.traffic.load(2, KEYS[:2], [3, 4])
    assert one.end().good is None
    assert (one.memory[3] == 1).all()
    assert (one.memory[4] == 2).all()
    assert not one.memory[[0, 1, 2, 5]].any()


def test_copies_that_do_not_fit_a_row_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        Rows(memoryview(np.zeros((2, 100), np.uint8)), copies=3, part_bytes=40)


def test_draining_waits_for_what_is_under_way(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.fill()
    one.traffic.load(2, KEYS, list(range(COUNT)))
    one.traffic.drain()
    assert one.traffic.busy()
    assert one.end().good is None


def test_stopping_while_the_kernel_holds_rows_says_so(bench: Callable[..., Bench]) -> None:
    one = bench()
    one.fill(1)
    one.hang()
    one.traffic.load(2, KEYS[:1], [0])
    one.traffic.end_step()
    limit_s = time.monotonic() + 20
    while not any(device.stalled() for device in one.devices):
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    one.traffic.stop(10)
    assert not one.traffic.wait_released(0.05)
    one.release()
    assert one.traffic.wait_released(10)
