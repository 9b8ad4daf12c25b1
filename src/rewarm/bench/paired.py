"""What repeats of two targets say about their difference: a paired interval on the ratio, and the noise floor.

The unit is the repeat. Requests of one wave share its medium and its moment, so they are not independent: each repeat
gives one ratio, of the mean times of its paired requests, and Student's t over the logarithms of these ratios gives the
interval, outliers trimmed where repeats are many. The mean of the requests' own ratios would be ruled by the shortest
ones, which are mostly wake-ups.
A difference is claimed only when it is larger than the noise floor: the interval's half width or `NOISE_MIN`, whichever
is larger. One repeat has no interval and claims nothing. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import msgspec

CONFIDENCE = 0.98
"""Of twenty comparisons of a target with itself nineteen must say so; at 95 % one in twenty would err by chance alone,
and at 99 % three repeats, the default, often fail to tell a fifth apart."""
NOISE_MIN = 0.02
"""A difference of less than 2 % is never claimed: clocks, wake-ups and the order of two runs are in it."""

TRIM, TRIM_FROM = 0.2, 7
"""Share of the repeats left out at either end, and from how many on: with fewer the interval would only widen."""

# Two-sided 98 % quantiles of Student's t for 1, 2, .. degrees of freedom (Fisher and Yates, table III).
_T98 = (
    31.821, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764,
    2.718, 2.681, 2.650, 2.624, 2.602, 2.583, 2.567, 2.552, 2.539, 2.528,
    2.518, 2.508, 2.500, 2.492, 2.485, 2.479, 2.473, 2.467, 2.462, 2.457,
)  # fmt: skip

Sample = Sequence[Sequence[float]]
"""`sample[r][k]` is request k of repeat r, above 0; every repeat has at least one."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as long the second target takes. `low` and `high` bound it at 98 %; `noise` is the share below
    which nothing is claimed. These three are null with one repeat."""

    ratio: float
    low: float | None
    high: float | None
    noise: float | None
    repeats: int
    pairs: int
    claimed: bool


def effect_of(*conditions: tuple[Sample, Sample]) -> Effect:
    """The effect over one or more conditions, each weighing the same; each is (first, second), paired by place.

    Pre-condition: both sides of a pair have one shape, and all conditions the same number of repeats.
    """
    by_condition = [_means(first, second) for first, second in conditions]
    means = [fmean(values) for values in zip(*by_condition, strict=True)]
    pairs = sum(len(repeat) for first, _ in conditions for repeat in first)
    count, middle = len(means), fmean(means)
    if count < 2:
        return Effect(
            ratio=math.exp(middle), low=None, high=None, noise=None, repeats=count, pairs=pairs, claimed=False
        )
    middle, half = _interval(means)
    floor = max(half, math.log1p(NOISE_MIN))
    return Effect(
        ratio=math.exp(middle),
        low=math.exp(middle - half),
        high=math.exp(middle + half),
        noise=math.expm1(floor),
        repeats=count,
        pairs=pairs,
        claimed=abs(middle) > floor,
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Middle and half width at 98 %. From `TRIM_FROM` repeats on a fifth is trimmed at each end, so that one in
    which the machine did other things does not decide: trimmed mean, winsorised deviation; Tukey, McLaughlin 1963.
    """
    count = len(values)
    cut = int(TRIM * count) if count >= TRIM_FROM else 0
    ranked = sorted(values)
    kept = ranked[cut : count - cut]
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    error = stdev(winsorised) / (len(kept) / count * math.sqrt(count))
    return fmean(kept), t98(len(kept) - 1) * error


def _means(first: Sample, second: Sample) -> list[float]:
    """The logarithm of the ratio of the mean times, for each repeat."""
    return [math.log(fmean(other) / fmean(one)) for one, other in zip(first, second, strict=True)]


def t98(freedom: int) -> float:
    """The two-sided 98 % quantile of Student's t; above 30 degrees of freedom that of 30, which is a little wider."""
    return _T98[min(freedom, len(_T98)) - 1]
