"""When the requests of a wave end, and what a closed or open loop reaches, on a medium of one bandwidth. Closed forms.

All times are seconds, sizes bytes, bandwidths bytes/s. A wave's requests start together at time 0; each has a fixed
time that overlaps the others' and the medium is work-conserving, so the last request ends at the same time under
every order. Nothing here measures; `plan` and `bench` compare these forms with readings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError

FloatArray = npt.NDArray[np.float64]
Sizes = Sequence[float] | Sequence[int] | npt.NDArray[np.float64] | npt.NDArray[np.int64]


def all_at_once(sizes_bytes: Sizes, bandwidth_bytes_per_s: float, fixed_s: float = 0.0) -> FloatArray:
    """End of each request, shape (N,), when all share the medium equally (egalitarian processor sharing, exact).

    With sizes sorted s_1 <= ... <= s_N: T_k = fixed_s + (s_1 + ... + s_k + (N - k) s_k) / B. Equal sizes all end at
    fixed_s + N S / B, so p50 = p99. Source: Kleinrock, Queueing Systems vol. 2, section 4.4.
    """
    sizes, bandwidth = _checked(sizes_bytes, bandwidth_bytes_per_s, fixed_s)
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    waiting = np.arange(len(sizes) - 1, -1, -1, dtype=np.float64)
    return _unsort(fixed_s + (np.cumsum(ascending) + waiting * ascending) / bandwidth, order)


def arrival_order(sizes_bytes: Sizes, bandwidth_bytes_per_s: float, fixed_s: float = 0.0) -> FloatArray:
    """End of each request, shape (N,), when they are served one after another in the order given.

    T_k = fixed_s + (s_1 + ... + s_k) / B; for equal sizes the median is about half of `all_at_once`.
    """
    sizes, bandwidth = _checked(sizes_bytes, bandwidth_bytes_per_s, fixed_s)
    return fixed_s + np.cumsum(sizes) / bandwidth


def shortest_first(sizes_bytes: Sizes, bandwidth_bytes_per_s: float, fixed_s: float = 0.0) -> FloatArray:
    """End of each request, shape (N,) in the order given, when the shortest is served first; equal sizes in order.

    Least mean time of all orders. Source: Smith 1956; with arrivals over time it becomes shortest remaining first.
    """
    sizes, bandwidth = _checked(sizes_bytes, bandwidth_bytes_per_s, fixed_s)
    order = np.argsort(sizes, kind="stable")
    return _unsort(fixed_s + np.cumsum(sizes[order]) / bandwidth, order)


def closed_loop_requests_per_s(
    concurrency: float,
    size_bytes: float,
    bandwidth_bytes_per_s: float,
    *,
    fixed_s: float = 0.0,
    decode_s: float = 0.0,
    think_s: float = 0.0,
) -> float:
    """Upper bound of the throughput of N clients: X <= min(N / (t_0 + S/B + D + Z), B / S).

    Source: asymptotic bounds of operational analysis, Denning and Buzen 1978.
    """
    size, bandwidth = _positive(size_bytes, "size_bytes"), _positive(bandwidth_bytes_per_s, "bandwidth_bytes_per_s")
    alone = size / bandwidth + _sum_not_negative(fixed_s=fixed_s, decode_s=decode_s, think_s=think_s)
    return min(_positive(concurrency, "concurrency") / alone, bandwidth / size)


def knee_concurrency(
    size_bytes: float,
    bandwidth_bytes_per_s: float,
    *,
    fixed_s: float = 0.0,
    decode_s: float = 0.0,
    think_s: float = 0.0,
) -> float:
    """Concurrency at which the two bounds of a closed loop meet: N* = (t_0 + D + Z) B / S + 1."""
    size, bandwidth = _positive(size_bytes, "size_bytes"), _positive(bandwidth_bytes_per_s, "bandwidth_bytes_per_s")
    return _sum_not_negative(fixed_s=fixed_s, decode_s=decode_s, think_s=think_s) * bandwidth / size + 1


def load_of(requests_per_s: float, mean_size_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Load of a medium, rho = X S / B. Keep it at or below 0.7: there the mean time is 3.3 times an idle medium's."""
    rate = _sum_not_negative(requests_per_s=requests_per_s)
    size = _positive(mean_size_bytes, "mean_size_bytes")
    return rate * size / _positive(bandwidth_bytes_per_s, "bandwidth_bytes_per_s")


def open_loop_mean_s(requests_per_s: float, mean_size_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Mean time of a restore under Poisson arrivals, M/G/1 processor sharing: E[T] = (S/B) / (1 - rho).

    It depends on the mean size only; `inf` at rho >= 1. Source: Kleinrock, Queueing Systems vol. 2, section 4.4.
    """
    rho = load_of(requests_per_s, mean_size_bytes, bandwidth_bytes_per_s)
    return mean_size_bytes / bandwidth_bytes_per_s / (1 - rho) if rho < 1 else math.inf


def concurrency_of(
    requests_per_s: float, ttft_s: float, output_tokens: float, tpot_s: float, think_s: float = 0.0
) -> float:
    """Little's law, N = X (TTFT + output_tokens x TPOT + Z). Source: Little 1961."""
    return _sum_not_negative(requests_per_s=requests_per_s) * _cycle_s(ttft_s, output_tokens, tpot_s, think_s)


def requests_per_s_of(
    concurrency: float, ttft_s: float, output_tokens: float, tpot_s: float, think_s: float = 0.0
) -> float:
    """Little's law the other way: X = N / (TTFT + output_tokens x TPOT + Z). `ConfigError` where that is no time."""
    return _positive(concurrency, "concurrency") / _positive(
        _cycle_s(ttft_s, output_tokens, tpot_s, think_s), "ttft_s + output_tokens x tpot_s + think_s"
    )


def _cycle_s(ttft_s: float, output_tokens: float, tpot_s: float, think_s: float) -> float:
    decode_s = _sum_not_negative(output_tokens=output_tokens) * _sum_not_negative(tpot_s=tpot_s)
    return _sum_not_negative(ttft_s=ttft_s, think_s=think_s) + decode_s


def _checked(sizes_bytes: Sizes, bandwidth: float, fixed_s: float) -> tuple[FloatArray, float]:
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    if sizes.ndim != 1 or not np.all(np.isfinite(sizes)) or np.any(sizes < 0):
        raise ConfigError("sizes_bytes must be one row of finite sizes of at least 0 bytes")
    _sum_not_negative(fixed_s=fixed_s)
    return sizes, _positive(bandwidth, "bandwidth_bytes_per_s")


def _unsort(values: FloatArray, order: npt.NDArray[np.intp]) -> FloatArray:
    out = np.empty_like(values)
    out[order] = values
    return out


def _positive(value: float, name: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
    return value


def _sum_not_negative(**values: float) -> float:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be zero or a positive number, got {value!r}")
    return sum(values.values())
