"""Fits fixed time and effective bandwidth to the result of a benchmark, and says how well they explain it.

For restores served all at once request k of a wave of N ends at t_0 + N S / B; served one after another, at
t_0 + k S / B. The fit minimises relative errors of the median, with t_0 >= 0 and B no more than the probed peak. It
reads the few fields of a benchmark's result that it needs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from rewarm.errors import ConfigError
from rewarm.plan.result import Calibration, Residual
from rewarm.plan.spec import PlanSpec

ORDERS = ("together", "one after another")


class _Percentiles(msgspec.Struct):
    p50: float | None
    p90: float | None = None


class _Bytes(msgspec.Struct):
    payload: int


class _Cell(msgspec.Struct):
    target: str
    concurrency: int
    ttft_s: _Percentiles
    bytes: _Bytes
    modelled_s: float = 0.0
    misses: int = 0
    cold: str = ""


class _Ceiling(msgspec.Struct):
    target: str
    read_bytes_per_s: float


class _Result(msgspec.Struct):
    schema: int
    cells: list[_Cell]
    ceiling: list[_Ceiling] = []


@dataclass(frozen=True)
class Point:
    """One measured wave: `concurrency` restores of `size_bytes` each; median and 90th percentile in s."""

    concurrency: int
    size_bytes: float
    p50_s: float
    p90_s: float | None = None

    def work_bytes(self, order: str, percent: int = 50) -> float:
        """Bytes that the medium has read when the request of that percentile ends."""
        last = order == "together"
        return self.size_bytes * (self.concurrency if last else math.ceil(self.concurrency * percent / 100))


def calibrate(
    text: str | bytes, where: str = "result", probed: Mapping[str, float] | None = None
) -> tuple[Calibration, ...]:
    """One fit for every target of a result; `probed` are peaks in bytes/s by target, besides the result's own ceiling.

    Raises `ConfigError` when the text is no result, or has no usable cell.
    """
    try:
        result = msgspec.json.decode(text, type=_Result)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where} is not the result of a benchmark (rewarm bench -o): {error}") from error
    targets = list(dict.fromkeys(cell.target for cell in result.cells))
    found = []
    for target in targets:
        points = _points(cell for cell in result.cells if cell.target == target)
        own = [ceiling.read_bytes_per_s for ceiling in result.ceiling if ceiling.target == target]
        peak = min(max(own, default=math.inf), (probed or {}).get(target, math.inf))
        if points:
            found.append(fit(points, target, peak=peak if peak < math.inf else None))
    if not found:
        raise ConfigError(f"{where}: no cell of {', '.join(targets) or 'any target'} is a cold wave without misses")
    return tuple(found)


def _points(cells: Iterable[_Cell]) -> list[Point]:
    """The median over repeats of every concurrency. Cells that missed or were not cold measure something else."""
    groups: dict[int, list[Point]] = {}
    for cell in cells:
        if cell.misses or cell.cold == "failed" or cell.ttft_s.p50 is None:
            continue
        p90 = None if cell.ttft_s.p90 is None else cell.ttft_s.p90 - cell.modelled_s
        size = cell.bytes.payload / cell.concurrency
        groups.setdefault(cell.concurrency, []).append(
            Point(cell.concurrency, size, cell.ttft_s.p50 - cell.modelled_s, p90)
        )
    return [_median(points) for _, points in sorted(groups.items())]


def _median(points: list[Point]) -> Point:
    p90s = [point.p90_s for point in points if point.p90_s is not None]
    return Point(
        points[0].concurrency,
        points[0].size_bytes,
        statistics.median(point.p50_s for point in points),
        statistics.median(p90s) if p90s else None,
    )


def fit(points: list[Point], target: str, *, peak: float | None = None) -> Calibration:
    """Fit one medium. The order is the one that explains median and 90th percentile better."""
    fits = {order: _fit_order(points, order, peak) for order in ORDERS}
    order = min(ORDERS, key=lambda name: _badness(points, name, *fits[name]))
    fixed, rate = fits[order]
    residuals = []
    for point in points:
        model = fixed + point.work_bytes(order) / rate
        residuals.append(
            Residual(
                target=target, concurrency=point.concurrency, measured_s=point.p50_s, model_s=model,
                error=model / point.p50_s - 1,
            )
        )  # fmt: skip
    return Calibration(
        target=target, order=order, fixed_s=fixed, bytes_per_s=rate, probed_bytes_per_s=peak,
        at_peak=peak is not None and rate >= peak, residuals=tuple(residuals),
    )  # fmt: skip


def _fit_order(points: list[Point], order: str, peak: float | None) -> tuple[float, float]:
    """Least squares of (t_0 + W u - y) / y over t_0 >= 0 and u = 1 / B >= 1 / peak."""
    work = np.array([point.work_bytes(order) for point in points])
    measured = np.array([point.p50_s for point in points])
    least = 1 / peak if peak else 0.0
    if len(points) > 1:
        matrix = np.stack([1 / measured, work / measured], axis=1)
        scale = np.abs(matrix).max(axis=0)
        (fixed, per_byte), *_ = np.linalg.lstsq(matrix / scale, np.ones(len(points)), rcond=None)
        fixed, per_byte = fixed / scale[0], per_byte / scale[1]
        if fixed >= 0 and per_byte >= max(least, 1e-18):
            return float(fixed), float(1 / per_byte)
    if peak and len(points) > 1:
        fixed = fixed_time(points, order, peak)
        if fixed >= 0:
            return fixed, peak
    weights = work / measured
    per_byte = float(weights.sum() / (weights @ weights))
    return 0.0, peak if peak and per_byte <= least else 1 / per_byte


def fixed_time(points: list[Point], order: str, bytes_per_s: float) -> float:
    """The fixed time that explains waves best when the bandwidth is known; may be negative for a wrong bandwidth."""
    weights = np.array([1 / point.p50_s for point in points])
    left = np.array([1 - point.work_bytes(order) / bytes_per_s / point.p50_s for point in points])
    return float((weights @ left) / (weights @ weights))


def _badness(points: list[Point], order: str, fixed: float, rate: float) -> float:
    total = 0.0
    for point in points:
        for percent, measured in ((50, point.p50_s), (90, point.p90_s)):
            if measured is not None:
                total += ((fixed + point.work_bytes(order, percent) / rate) / measured - 1) ** 2
    return total


def apply(spec: PlanSpec, fits: tuple[Calibration, ...]) -> PlanSpec:
    """The plan with measured values of its media: a target belongs to the medium of the same name.

    Media that were not benchmarked keep their rates and get the mean fixed time, which is the server's more than the
    medium's. Raises `ConfigError` when no target is a medium of the plan.
    """
    by_name = {calibration.target: calibration for calibration in fits}
    names = [medium.name for medium in spec.medium]
    known = [by_name[name] for name in names if name in by_name]
    if not known:
        raise ConfigError(f"--calibrate: the result's targets {', '.join(by_name)} are no media of the plan"
                          f" ({', '.join(names)}); give both the same name")  # fmt: skip
    mean = statistics.fmean(calibration.fixed_s for calibration in known)
    media, measured = [], list(spec.measured)
    for medium in spec.medium:
        found = by_name.get(medium.name)
        fixed = found.fixed_s if found else mean
        media.append(
            msgspec.structs.replace(
                medium, fixed_time=fixed, effective_read=found.bytes_per_s if found else medium.effective_read
            )
        )
        measured += [f"medium.{medium.name}.fixed_time"]
        measured += [f"medium.{medium.name}.effective_read"] if found else []
    return msgspec.structs.replace(spec, medium=tuple(media), measured=tuple(dict.fromkeys(measured)))
