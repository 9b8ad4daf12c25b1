"""A histogram of durations with buckets of equal ratio: bounded memory, percentiles within half a per cent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_RATIO = 1.01
_FLOOR_S = 1e-6
_BUCKETS = 3_000
"""1 microsecond times 1.01 ** 3000 is 9e6 s x 1e6: beyond any trace."""


class DurationHistogram:
    """Counts durations in s; below 1 microsecond counts as 0."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_BUCKETS + 1, dtype=np.int64)

    def add(self, durations_s: NDArray[np.float64]) -> None:
        """Count durations, all at least 0."""
        scaled = np.log(np.maximum(durations_s, _FLOOR_S) / _FLOOR_S) / np.log(_RATIO)
        bucket = np.where(durations_s < _FLOOR_S, 0, np.minimum(scaled.astype(np.int64) + 1, _BUCKETS))
        self._counts += np.bincount(bucket, minlength=_BUCKETS + 1)

    @property
    def count(self) -> int:
        """Durations counted."""
        return int(self._counts.sum())

    def percentile(self, percent: float) -> float:
        """The duration that `percent` of the counted ones do not exceed; NaN when none was counted."""
        if not self.count:
            return float("nan")
        bucket = int(np.searchsorted(np.cumsum(self._counts), percent / 100 * self.count))
        return 0.0 if bucket == 0 else float(_FLOOR_S * _RATIO ** (min(bucket, _BUCKETS) - 0.5))
