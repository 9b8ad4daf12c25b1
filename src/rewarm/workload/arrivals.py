"""When requests arrive: all at once, as a Poisson stream, or as a trace says. Seeded, so a run can be repeated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rewarm.errors import ConfigError


def wave(count: int) -> NDArray[np.float64]:
    """`count` requests at time 0."""
    if count < 1:
        raise ConfigError(f"a wave has {count} requests; it needs at least 1")
    return np.zeros(count)


def poisson(requests_per_s: float, count: int, seed: int) -> NDArray[np.float64]:
    """`count` arrival times in s of a Poisson stream of `requests_per_s`."""
    if not requests_per_s > 0:
        raise ConfigError(f"requests_per_s is {requests_per_s}; it must be positive")
    return np.cumsum(np.random.default_rng(seed).exponential(1 / requests_per_s, count))
