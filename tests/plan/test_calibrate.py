"""Fits of fixed time and bandwidth to results of the benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from rewarm.errors import ConfigError
from rewarm.plan import apply, calibrate, make_spec
from rewarm.plan.calibrate import Point, fit

SIZE = 2e9


def wave(order: str, count: int, fixed: float, rate: float, percent: int) -> float:
    served = count if order == "together" else math.ceil(count * percent / 100)
    return fixed + served * SIZE / rate


def result(
    order: str = "together", fixed: float = 0.5, rate: float = 5e9, peak: float | None = 6e9, **extra: Any
) -> str:
    cells = [
        {
            "target": "local", "concurrency": n, "repeat": repeat, "cold": "proven", "misses": 0,
            "ttft_s": {"p50": wave(order, n, fixed, rate, 50) * noise, "p90": wave(order, n, fixed, rate, 90) * noise},
            "bytes": {"payload": int(n * SIZE), "padding": 0, "log": 0, "kernel": None},
            **extra,
        }
        for n in (8, 16, 32)
        for repeat, noise in enumerate((0.99, 1.0, 1.02))
    ]  # fmt: skip
    ceiling = [] if peak is None else [{"target": "local", "read_bytes_per_s": peak, "block_bytes": 1}]
    return json.dumps({"schema": 1, "version": "x", "cells": cells, "ceiling": ceiling, "job": {"model": "m"}})


@pytest.mark.parametrize("order", ["together", "one after another"])
def test_fixed_time_bandwidth_and_order_are_found_again(order: str) -> None:
    (found,) = calibrate(result(order))
    assert found.order == order
    assert found.fixed_s == pytest.approx(0.5, rel=1e-6)
    assert found.bytes_per_s == pytest.approx(5e9, rel=1e-6)
    assert not found.at_peak
    assert [residual.concurrency for residual in found.residuals] == [8, 16, 32]
    assert all(abs(residual.error) < 1e-6 for residual in found.residuals)


def test_never_above_the_probed_peak() -> None:
    (found,) = calibrate(result(peak=4e9))
    assert found.bytes_per_s == 4e9
    assert found.at_peak
    assert found.fixed_s >= 0
    assert max(abs(residual.error) for residual in found.residuals) > 0.05
    (other,) = calibrate(result(peak=None), probed={"local": 4.5e9})
    assert other.bytes_per_s == 4.5e9


def test_a_wrong_model_shows_in_the_residuals() -> None:
    points = [Point(8, SIZE, 10.0), Point(16, SIZE, 4.0), Point(32, SIZE, 30.0)]
    assert max(abs(residual.error) for residual in fit(points, "x").residuals) > 0.3


def test_modelled_prefill_is_taken_off() -> None:
    (plain,) = calibrate(result())
    longer = json.loads(result())
    for cell in longer["cells"]:
        cell["modelled_s"] = 2.0
        cell["ttft_s"] = {name: value + 2.0 for name, value in cell["ttft_s"].items()}
    (found,) = calibrate(json.dumps(longer))
    assert found.fixed_s == pytest.approx(plain.fixed_s)


@pytest.mark.parametrize("extra", [{"misses": 3}, {"cold": "failed"}])
def test_cells_that_measured_something_else_are_left_out(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no cell of local is a cold wave without misses"):
        calibrate(result(**extra))


def test_what_is_no_result_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a\.json is not the result of a benchmark"):
        calibrate("{}", "a.json")
    with pytest.raises(ConfigError, match="not the result"):
        calibrate("[1", "a.json")


def test_a_plan_takes_the_values_of_its_media(table: Callable[..., dict[str, Any]]) -> None:
    spec = apply(make_spec(table()), calibrate(result()))
    local, array = spec.medium
    assert local.effective_read == pytest.approx(5e9)
    assert local.fixed_time == pytest.approx(0.5)
    assert array.fixed_time == local.fixed_time, "not benchmarked: the server's fixed time, its own rate"
    assert array.effective_read is None
    assert "medium.local.effective_read" in spec.measured
    assert "medium.array.effective_read" not in spec.measured
    other = make_spec(table(medium=[{"name": "tape", "drive_read": "1GB/s"}]))
    with pytest.raises(ConfigError, match=r"targets local are no media of the plan \(tape\)"):
        apply(other, calibrate(result()))
