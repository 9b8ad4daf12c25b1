"""The emulated medium, on a simulated clock: its rate, its fairness to a real device, and that nothing is lost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.bench.throttle import RateLimit, ThrottledDevice
from rewarm.errors import ConfigError
from rewarm.store.devices.base import COMPLETION, OPERATION, READ, WRITE, Completions, Operations
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

RATE = 1000.0


class Clock:
    """Time that only waiting moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class InstantDevice:
    """A device that finishes everything `delay_s` after its submission, on a simulated clock."""

    name = "instant"
    depth = 64

    def __init__(self, clock: Clock, delay_s: float = 0.0) -> None:
        self.clock = clock
        self.delay_s = delay_s
        self.flying: list[tuple[float, int, int]] = []
        self.woken = False

    def submit(self, operations: Operations) -> None:
        assert len(operations) <= self.depth - len(self.flying)
        for operation in operations:
            self.flying.append((self.clock.now + self.delay_s, int(operation["tag"]), int(operation["length"])))

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        wanted = sorted(at for at, _, _ in self.flying)[: max(minimum, 1)]
        until = wanted[-1] if wanted else math.inf
        limit = math.inf if timeout_s is None else self.clock.now + timeout_s
        if minimum and not self.woken:
            assert min(until, limit) < math.inf, "would wait for ever"
            self.clock.now = max(self.clock.now, min(until, limit))
        self.woken = False
        done = [entry for entry in self.flying if entry[0] <= self.clock.now]
        self.flying = [entry for entry in self.flying if entry[0] > self.clock.now]
        return np.array([(tag, length) for _, tag, length in done], COMPLETION)

    def wake(self) -> None:
        self.woken = True

    def in_flight(self) -> int:
        return len(self.flying)

    def close(self) -> None:
        self.flying.clear()


def batch(lengths: list[int], opcode: int = READ, first: int = 0) -> Operations:
    operations = np.zeros(len(lengths), OPERATION)
    operations["tag"] = np.arange(first, first + len(lengths))
    operations["opcode"] = opcode
    operations["length"] = lengths
    return operations


def reap_all(device: ThrottledDevice, minimum: int = 1) -> list[int]:
    """Tags in the order they were handed over."""
    tags: list[int] = []
    while device.in_flight():
        tags += device.reap(minimum)["tag"].tolist()
    return tags


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=64), minimum=st.integers(1, 64))
def test_bytes_never_come_faster_than_the_rate_and_no_slower(lengths: list[int], minimum: int) -> None:
    clock = Clock()
    device = ThrottledDevice(InstantDevice(clock), RateLimit(RATE, clock))
    device.submit(batch(lengths))
    handed, left = 0, len(lengths)
    while device.in_flight():
        done = device.reap(min(minimum, left))
        handed += int(done["result"].sum())
        left -= len(done)
        assert handed <= RATE * clock.now * (1 + 1e-9)
    assert handed == sum(lengths)
    assert clock.now == pytest.approx(sum(lengths) / RATE)


def test_a_medium_slower_than_the_rate_stays_as_slow_as_it_is() -> None:
    clock = Clock()
    device = ThrottledDevice(InstantDevice(clock, delay_s=7.0), RateLimit(RATE, clock))
    device.submit(batch([1000]))
    assert reap_all(device) == [0]
    assert clock.now == 7.0


def test_idle_time_is_not_saved_up() -> None:
    clock = Clock()
    device = ThrottledDevice(InstantDevice(clock), RateLimit(RATE, clock))
    clock.now = 100.0
    device.submit(batch([1000, 1000]))
    reap_all(device)
    assert clock.now == pytest.approx(102.0)


def test_two_devices_share_one_medium() -> None:
    clock = Clock()
    limit = RateLimit(RATE, clock)
    one, other = limit.wrap(InstantDevice(clock)), limit.wrap(InstantDevice(clock))
    one.submit(batch([1000]))
    other.submit(batch([1000]))
    reap_all(one)  # type: ignore[arg-type]
    reap_all(other)  # type: ignore[arg-type]
    assert clock.now == pytest.approx(2.0)


def test_writes_and_syncs_pass_untouched() -> None:
    clock = Clock()
    device = ThrottledDevice(InstantDevice(clock), RateLimit(RATE, clock))
    device.submit(batch([10**6], WRITE))
    assert reap_all(device) == [0]
    assert clock.now == 0.0


def test_a_timeout_ends_the_wait() -> None:
    clock = Clock()
    device = ThrottledDevice(InstantDevice(clock), RateLimit(RATE, clock))
    device.submit(batch([1000]))
    assert len(device.reap(1, 0.25)) == 0
    assert clock.now == pytest.approx(0.25)
    assert device.in_flight() == 1
    assert len(device.reap(1, 10.0)) == 1


def test_a_wake_is_not_lost_while_completions_are_held() -> None:
    clock = Clock()
    inner = InstantDevice(clock)
    device = ThrottledDevice(inner, RateLimit(RATE, clock))
    device.submit(batch([10**6]))
    assert len(device.reap(1, 0.0)) == 0  # the completion is in our hands now
    device.wake()
    assert len(device.reap(1, None)) == 0
    assert clock.now < 1.0


def test_looking_without_waiting_does_not_wait() -> None:
    clock = Clock()
    device = ThrottledDevice(InstantDevice(clock), RateLimit(RATE, clock))
    device.submit(batch([1000]))
    assert len(device.reap(0)) == 0
    assert clock.now == 0.0


def test_an_ended_emulation_holds_nothing_back() -> None:
    clock = Clock()
    limit = RateLimit(RATE, clock)
    device = ThrottledDevice(InstantDevice(clock), limit)
    device.submit(batch([10**9]))
    assert len(device.reap(1, 0.0)) == 0
    limit.end()
    assert len(device.reap(1, 0.0)) == 1
    device.submit(batch([10**9]))
    assert len(device.reap(1, 0.0)) == 1
    assert clock.now == 0.0


def test_a_rate_is_above_zero_and_the_name_says_emulated() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        RateLimit(0.0)
    assert "emulated at 1.00 kB/s" in RateLimit(RATE).wrap(InstantDevice(Clock())).name


def test_a_store_behind_it_returns_the_right_bytes(tmp_path: Path) -> None:
    keys, size = make_keys(32), 64 << 10
    with open_store(f"file://{tmp_path}?capacity=64MiB", namespace="n") as store:
        assert all(store.save(keys, [payload(key, size) for key in keys]).wait(30))
    limit = RateLimit(200e6)
    with open_store(f"file://{tmp_path}", namespace="n", device_wrapper=limit.wrap) as store:
        buffers = np.zeros((32, size), np.uint8)
        assert all(store.load(keys, buffers).wait(30))
        assert [bytes(row) for row in buffers] == [payload(key, size) for key in keys]
