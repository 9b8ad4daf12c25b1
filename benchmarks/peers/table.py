"""The arithmetic and the table of the duel: passes in, medians, spread and ratios out. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Pass:
    """One pass over some requests, as a worker measured it. Bytes, seconds."""

    seconds: float
    cpu_s: float
    bytes: int
    kernel_bytes: int
    verified_bytes: int
    latencies_s: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """A cell of one peer. Rates are bytes per second of each round; shares are of the bytes asked for."""

    rates: tuple[float, ...]
    cpu_s_per_gb: float
    p50_s: float
    p99_s: float
    kernel_share: float
    verified_share: float
    bytes: int


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def summarise(rounds: Sequence[Sequence[Pass]]) -> Row:
    """One row from the passes of each round. A round's rate is its bytes by its seconds."""
    passes = [one for each in rounds for one in each]
    total = sum(one.bytes for one in passes)
    latencies = [latency for one in passes for latency in one.latencies_s]
    return Row(
        tuple(sum(one.bytes for one in each) / sum(one.seconds for one in each) for each in rounds),
        median(sum(one.cpu_s for one in each) / sum(one.bytes for one in each) * 1e9 for each in rounds),
        percentile(latencies, 0.5),
        percentile(latencies, 0.99),
        sum(one.kernel_bytes for one in passes) / total,
        sum(one.verified_bytes for one in passes) / total,
        passes[0].bytes,
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the ratios of rates measured in the same round."""
    return median(a / b for a, b in zip(ours, theirs, strict=False))


HEADER = (
    "| | GB/s (spread) | of the C ring | CPU s/GB | p50 / p99 of a request, ms | read by the kernel | verified |",
    "|---|---|---|---|---|---|---|",
)


def line(name: str, row: Row | str, reference: Row | None) -> str:
    """One line of a Markdown table; an error instead of a row stands in it as it is."""
    if isinstance(row, str):
        return f"| {name} | did not run: {row} | | | | | |"
    of = f"{ratio(row.rates, reference.rates):.2f}" if reference else "-"
    gb = [rate / 1e9 for rate in row.rates]
    return (
        f"| {name} | {median(gb):.2f} ({min(gb):.2f} .. {max(gb):.2f}) | {of} | {row.cpu_s_per_gb:.3f} "
        f"| {row.p50_s * 1e3:.1f} / {row.p99_s * 1e3:.1f} | {row.kernel_share:.1%} | {row.verified_share:.0%} |"
    )


def against(ours: str, what: str, theirs: Sequence[str], rows: dict[str, Row]) -> str:
    """One line that sets a row of ours against the fastest of theirs, paired by round."""
    ran = [name for name in theirs if name in rows]
    if ours not in rows or not ran:
        return f"* no rows to compare Rewarm {ours} with the best {what}"
    best = max(ran, key=lambda name: median(rows[name].rates))
    return f"* Rewarm {ours} reads at {ratio(rows[ours].rates, rows[best].rates):.2f} x the best {what}, {best}"


def best_of_families(families: dict[str, str], rows: dict[str, Row]) -> list[str]:
    """For each family the name with the highest median rate, in the order of the families; shape {name: family}."""
    best: dict[str, str] = {}
    for name, family in families.items():
        if name in rows and (family not in best or median(rows[name].rates) > median(rows[best[family]].rates)):
            best[family] = name
    return list(best.values())
