"""Where blocks go, and what makes a drive avoided: pure arithmetic with given clocks."""

from __future__ import annotations

import pytest

from rewarm.tiers.circuit import MEASURE_BYTES, PERIOD_BYTES, RETRY_S_MAX, Circuit, Meter
from rewarm.tiers.placement import RUN_BYTES, Placement, shares

BLOCK = 64 << 10


def spread(placement: Placement, blocks: int, share: list[float], usable: list[int] | None = None) -> list[int]:
    """Bytes per drive after so many more blocks."""
    got = [0] * len(share)
    for _ in range(blocks):
        got[placement.choose(BLOCK, share, usable or range(len(share)))] += BLOCK
    return got


def placement_over(drives: int) -> Placement:
    placement = Placement()
    for _ in range(drives):
        placement.add_drive(0)
    return placement


def test_equal_drives_get_equal_shares_to_within_a_run() -> None:
    placement = placement_over(4)
    for blocks in (7, 64, 1, 333):
        got = spread(placement, blocks, [0.25] * 4)
        assert max(got) - min(got) <= 2 * RUN_BYTES


def test_unequal_drives_get_shares_by_speed() -> None:
    share = shares([100e6, 300e6])
    assert share == [0.25, 0.75]
    got = spread(placement_over(2), 4096, share)
    assert got[1] / sum(got) == pytest.approx(0.75, abs=0.01)


def test_small_differences_of_speed_are_noise() -> None:
    assert shares([1.0e9, 1.2e9]) == [0.5, 0.5]
    assert shares([None, None, None]) == [1 / 3] * 3
    assert shares([1e9, None, 3e9]) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_many_small_saves_are_spread_like_one_large() -> None:
    placement = placement_over(2)
    got = [sum(column) for column in zip(*(spread(placement, 3, [0.5, 0.5]) for _ in range(512)), strict=True)]
    assert abs(got[0] - got[1]) <= RUN_BYTES


def test_a_drive_that_was_avoided_does_not_make_up_for_it() -> None:
    placement = placement_over(2)
    assert spread(placement, 1000, [0.5, 0.5], usable=[0])[1] == 0
    got = spread(placement, 1000, [0.5, 0.5])
    assert abs(got[0] - got[1]) <= 2 * RUN_BYTES


def test_a_new_drive_joins_with_its_share_and_the_emptier_of_two_comes_first() -> None:
    placement = Placement()
    placement.add_drive(10 << 20)
    placement.add_drive(1 << 20)
    assert placement.choose(BLOCK, [0.5, 0.5], [0, 1]) == 1
    spread(placement, 4000, [0.5, 0.5])
    placement.add_drive(0)
    got = spread(placement, 3000, [1 / 3] * 3)
    assert max(got) - min(got) <= 2 * RUN_BYTES


def test_a_circuit_opens_waits_longer_each_time_and_closes() -> None:
    circuit = Circuit()
    assert circuit.allows(0.0)
    assert circuit.fail("reads fail", 0.0)
    assert not circuit.fail("reads fail", 1.0), "it was open already"
    assert (circuit.due(2.9), circuit.due(3.0)) == (False, True)
    for _ in range(10):
        circuit.fail("reads fail", 3.0)
    assert circuit.due(3.0 + RETRY_S_MAX)
    assert circuit.succeed()
    assert circuit.reason is None
    assert not circuit.succeed()
    assert circuit.fail("again", 100.0)
    assert circuit.due(101.0)


def test_the_meter_measures_busy_time_only() -> None:
    meter = Meter()
    for start_s in (0.0, 100.0, 200.0):
        meter.begin(start_s)
        meter.moved(MEASURE_BYTES // 2, start_s + 1, idle=True)
    assert meter.bytes_per_s == pytest.approx(MEASURE_BYTES / 2)


def test_the_meter_is_not_taken_in_by_bursts() -> None:
    meter = Meter()
    meter.begin(0.0)
    now_s = 0.0
    for _ in range(20):  # 32 MiB in 10 ms, then nothing for 90 ms
        meter.moved(2 * MEASURE_BYTES, now_s + 0.01, idle=False)
        now_s += 0.1
        if meter.bytes_per_s is not None:
            assert meter.bytes_per_s < 2 * 20 * MEASURE_BYTES
    assert meter.bytes_per_s == pytest.approx(20 * MEASURE_BYTES, rel=0.3)


def test_the_meter_follows_a_drive_that_becomes_slow() -> None:
    meter = Meter()
    meter.begin(0.0)
    for second in range(1, 60):
        meter.moved(MEASURE_BYTES if second < 5 else MEASURE_BYTES // 4, float(second), idle=False)
    assert meter.bytes_per_s == pytest.approx(MEASURE_BYTES / 4, rel=0.2)


def test_the_meter_ignores_periods_too_small_to_fill_a_drive() -> None:
    meter = Meter()
    for start_s in range(100):
        meter.begin(float(start_s))
        meter.moved(PERIOD_BYTES - 1, start_s + 0.9, idle=True)
    assert meter.bytes_per_s is None
