"""Medians over the repeats, and what they say in sentences. Pure: from cells to text.

A difference between two media is claimed only when it is larger than the spread of either; with one repeat there is
no spread and nothing is claimed. Emulated media are compared with emulated ones, measured with measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

from rewarm.bench.result import Cell, Difference, Percentiles, Recompute, Summary
from rewarm.units import format_duration, format_rate

_COLD_ORDER = ("failed", "not_provable", "proven")
"""The verdict of several cells is the worst of them."""


def summarise(cells: Sequence[Cell]) -> list[Summary]:
    """One summary per target and concurrency, in the order of the cells."""
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.target, cell.concurrency), []).append(cell)
    return [_summary(group) for group in groups.values()]


def _summary(cells: list[Cell]) -> Summary:
    first = cells[0]
    return Summary(
        target=first.target,
        emulated=first.emulated,
        concurrency=first.concurrency,
        repeats=len(cells),
        ttft_s=Percentiles(
            _median([cell.ttft_s.p50 for cell in cells]),
            _median([cell.ttft_s.p90 for cell in cells]),
            _median([cell.ttft_s.p99 for cell in cells]),
        ),
        restored_tokens_per_s=_median([cell.restored_tokens_per_s for cell in cells]),
        read_bytes_per_s=_median([cell.read_bytes_per_s for cell in cells]),
        ceiling_share=_median([cell.ceiling_share for cell in cells]),
        cpu_s_per_gb=_median([cell.cpu_s_per_gb for cell in cells]),
        spread=_spread([cell.ttft_s.p50 for cell in cells]),
        misses=sum(cell.misses for cell in cells),
        cold=min((cell.cold for cell in cells), key=_COLD_ORDER.index),
        recompute=first.recompute,
    )


def _median(values: Sequence[float | None]) -> float | None:
    """The median; None as soon as one value is missing: a failure does not average away."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return None
    return (max(known) - min(known)) / median(known)


def verdicts(summaries: Sequence[Summary]) -> list[str]:
    """Sentences: each measured target against recompute, then targets against each other."""
    by_target: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_target.setdefault(summary.target, []).append(summary)
    lines = [against_recompute(group) for group in by_target.values() if not group[0].emulated]
    for (_, one), (_, other) in combinations(by_target.items(), 2):
        if one[0].emulated == other[0].emulated:
            lines += [_between(a, b) for a, b in zip(one, other, strict=True)]
    return [line for line in lines if line]


def differences(summaries: Sequence[Summary]) -> list[Difference]:
    """Every target against recompute, and against each other target of its kind, at each concurrency."""
    found = [
        _difference(summary, "recompute", summary.recompute.ttft_s.p50, summary.spread)
        for summary in summaries
        if summary.recompute is not None
    ]
    for one, other in combinations(summaries, 2):
        if one.target != other.target and (one.concurrency, one.emulated) == (other.concurrency, other.emulated):
            found.append(_difference(other, one.target, one.ttft_s.p50, _noise(one, other)))
    return found


def _difference(summary: Summary, against: str, their_s: float | None, noise: float | None) -> Difference:
    mine_s = summary.ttft_s.p50
    ratio = None if mine_s is None or their_s is None else their_s / mine_s
    return Difference(
        target=summary.target,
        against=against,
        concurrency=summary.concurrency,
        emulated=summary.emulated,
        ratio=ratio,
        noise=noise,
        claimed=ratio is not None and noise is not None and abs(ratio - 1) > noise,
    )


def _noise(one: Summary, other: Summary) -> float | None:
    """The larger spread of two; None as soon as one has none."""
    return None if one.spread is None or other.spread is None else max(one.spread, other.spread)


def against_recompute(group: Sequence[Summary]) -> str:
    """One sentence on a measured target beside recompute; empty when that cannot be modelled."""
    parts = [_one_against_recompute(summary) for summary in group]
    recompute = group[0].recompute
    if recompute is None or not all(parts):
        return ""
    line = f"{group[0].target}: against {_recompute_of(recompute)}, median time to first token: {'; '.join(parts)}."
    rates = [summary.read_bytes_per_s for summary in group if summary.read_bytes_per_s is not None]
    if recompute.break_even_bytes_per_s is not None and rates:
        pays = format_rate(recompute.break_even_bytes_per_s)
        line += f" Restoring pays above {pays} here and the slowest wave had {format_rate(min(rates))}."
    cold = all(summary.cold == "proven" for summary in group)
    return line if cold else f"{line} These reads are not proven to be cold."


def _one_against_recompute(summary: Summary) -> str:
    if summary.recompute is None:
        return ""
    mine, theirs = summary.ttft_s.p50, summary.recompute.ttft_s.p50
    at = f"at {summary.concurrency}"
    if mine is None or theirs is None:
        return f"{at} no figure, requests failed"
    faster = theirs / mine
    word = f"{faster:.1f}x faster" if faster >= 1 else f"{1 / faster:.1f}x slower"
    return f"{at} {format_duration(mine)} against {format_duration(theirs)}, {word}"


def _between(one: Summary, other: Summary) -> str:
    """Two targets at one concurrency: how much faster the second is, or that it cannot be told."""
    label = f"{other.target} against {one.target} at concurrency {one.concurrency}"
    label += " (both emulated)" if one.emulated else ""
    found = _difference(other, one.target, one.ttft_s.p50, _noise(one, other))
    if found.ratio is None:
        return f"{label}: no figure, requests failed"
    if found.noise is None:
        return f"{label}: {found.ratio:.2f}x, from one repeat: without a spread nothing is claimed"
    if not found.claimed:
        return f"{label}: no difference beyond noise ({found.ratio:.2f}x, spread of the repeats {found.noise:.0%})"
    return f"{label}: median time to first token {found.ratio:.2f}x as short (spread of the repeats {found.noise:.0%})"


def _recompute_of(recompute: Recompute) -> str:
    """Where the figures of recompute come from."""
    if recompute.mfu is None:
        return f"recompute ({recompute.source} on the same server)"
    return f"recompute on {recompute.gpus} x {recompute.gpu} (modelled at {recompute.mfu:.0%} of peak)"
