"""Full samples as histograms with logarithmic buckets: what results carry so that others can merge and check them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BUCKETS_PER_DECADE = 20
"""Two neighbours differ by 12 %."""
_FIRST_S = 1e-6

Histogram = list[tuple[float, int]]
"""(upper bound in s, count) of every bucket that is not empty, in order."""


def histogram(values_s: npt.NDArray[np.float64]) -> Histogram:
    """Counts in logarithmic buckets, 20 to a decade from 1 microsecond on: (upper bound in s, count), none empty."""
    positions = np.ceil(np.log10(np.maximum(values_s, _FIRST_S) / _FIRST_S) * BUCKETS_PER_DECADE)
    buckets, counts = np.unique(positions.astype(np.int64), return_counts=True)
    bounds = _FIRST_S * 10.0 ** (buckets / BUCKETS_PER_DECADE)
    return list(zip(bounds.tolist(), counts.tolist(), strict=True))
