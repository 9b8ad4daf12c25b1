"""Two results of the same work beside each other: paired by wave, repeat and request, with a verdict in one sentence.

`compare` refuses results that did not ask for the same, because no arithmetic makes those comparable. It measures
nothing: how much to believe is in the results themselves, and what stands against them is in `notes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from rewarm.bench.histogram import Histogram, histogram
from rewarm.bench.host import package_version
from rewarm.bench.objectives import Judgement, judge_objective
from rewarm.bench.paired import CONFIDENCE, Effect, Sample, effect_of
from rewarm.bench.result import Cell, Percentiles, Result, Summary
from rewarm.errors import ConfigError
from rewarm.workload.objective import Objective

SCHEMA = 1
SAME_WORK = (
    "model", "tokens", "block_tokens", "kv_dtype", "tp", "new_tokens", "output_tokens", "shape", "think_s", "rounds",
    "requests_per_s", "trace", "write_bytes_per_s", "fresh_requests_per_s",
)  # fmt: skip
"""Keys of a job that must agree; waves and repeats may differ, what both have is compared."""

Times = dict[tuple[int, int], float | None]
"""(session, how often it was asked for before) -> seconds to the first token, None when the request failed."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two: a target of a result."""

    name: str
    """What sentences call it: the target, and the file where both targets are called the same."""
    file: str
    target: str
    emulated: bool
    version: str
    node: str | None
    seed: int
    cold: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repeats of one wave size, and every request of them as [upper bound in s, requests]."""

    ttft_s: Percentiles
    read_bytes_per_s: float | None
    restored_tokens_per_s: float | None
    ttft_histogram: Histogram


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One wave size. `ttft` is null when a request of it failed."""

    concurrency: int
    a: Figures
    b: Figures
    ttft: Effect | None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two targets compared. `ttft` is the effect over all wave sizes, each weighing the same."""

    a: Side
    b: Side
    rows: list[Row]
    ttft: Effect | None
    verdict: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `rewarm compare -o` writes, schema 1."""

    schema: int
    version: str
    confidence: float
    pairs: list[Pair]
    objectives: list[Judgement]
    notes: list[str]

    @property
    def missed(self) -> list[str]:
        """Objectives that one of the two misses, as sentences."""
        return [judgement.sentence for judgement in self.objectives if not judgement.met]


def compare(
    a: tuple[str, Result],
    b: tuple[str, Result],
    targets: tuple[str | None, str | None] = (None, None),
    objectives: Sequence[Objective] = (),
) -> Comparison:
    """Compare two results, each with the name of its file; `targets` picks one of each where they have several.

    Without, targets of the same name are compared, or the only ones. Raises `ConfigError` for different work, and
    where nothing can be paired.
    """
    _check_same_work(a, b)
    pairs = [_pair(a, b, one, other) for one, other in _targets(a, b, targets)]
    judged = [
        msgspec.structs.replace(judgement, target=side.name)
        for pair in pairs
        for side, (_, result) in ((pair.a, a), (pair.b, b))
        for objective in objectives
        for judgement in judge_objective(objective, [s for s in result.summary if s.target == side.target])
    ]
    return Comparison(
        schema=SCHEMA,
        version=package_version(),
        confidence=CONFIDENCE,
        pairs=pairs,
        objectives=judged,
        notes=_notes(a, b, pairs),
    )


def _check_same_work(a: tuple[str, Result], b: tuple[str, Result]) -> None:
    for key in SAME_WORK:
        one, other = a[1].job.get(key), b[1].job.get(key)
        known = key in a[1].job and key in b[1].job  # results of earlier versions do not name everything
        if known and one != other:
            raise ConfigError(f"{a[0]} and {b[0]} did not ask for the same: {key} is {one!r} in one and {other!r}")


def _targets(
    a: tuple[str, Result], b: tuple[str, Result], chosen: tuple[str | None, str | None]
) -> list[tuple[str, str]]:
    names = [list(dict.fromkeys(summary.target for summary in result.summary)) for _, result in (a, b)]
    for side, (file, _), choice in zip(names, (a, b), chosen, strict=True):
        if choice is not None and choice not in side:
            raise ConfigError(f"{file} has no target {choice!r}; one of {', '.join(side)}")
    if chosen != (None, None):
        for side, (file, _), choice in zip(names, (a, b), chosen, strict=True):
            if choice is None and len(side) > 1:
                raise ConfigError(f"{file} has the targets {', '.join(side)}; name the one to compare")
        return [(chosen[0] or names[0][0], chosen[1] or names[1][0])]
    if common := [name for name in names[0] if name in names[1]]:
        return [(name, name) for name in common]
    if len(names[0]) == len(names[1]) == 1:
        return [(names[0][0], names[1][0])]
    raise ConfigError(
        f"no target of {a[0]} ({', '.join(names[0])}) has the name of one of {b[0]} ({', '.join(names[1])}); "
        "say which two to compare"
    )


def _pair(a: tuple[str, Result], b: tuple[str, Result], one: str, other: str) -> Pair:
    waves_a, waves_b = _waves(a[1], one), _waves(b[1], other)
    sizes = [size for size in waves_a if size in waves_b]
    repeats = set.intersection(*(set(waves[size]) for waves in (waves_a, waves_b) for size in sizes)) if sizes else ()
    if not repeats:
        raise ConfigError(f"{one} of {a[0]} and {other} of {b[0]} have no wave and repeat in common")
    rows, samples = [], []
    for size in sizes:
        sample = _sample(
            [_times(waves_a[size][repeat]) for repeat in sorted(repeats)],
            [_times(waves_b[size][repeat]) for repeat in sorted(repeats)],
        )
        samples.append(sample)
        rows.append(
            Row(
                concurrency=size,
                a=_figures(a[1], one, size, waves_a[size].values()),
                b=_figures(b[1], other, size, waves_b[size].values()),
                ttft=effect_of(sample) if sample else None,
            )
        )
    sides = _side(a, one, b[0] != a[0] and one == other), _side(b, other, b[0] != a[0] and one == other)
    whole = [sample for sample in samples if sample]
    overall = effect_of(*whole) if len(whole) == len(samples) else None
    verdict = verdict_of(sides[0].name, sides[1].name, rows, overall)
    return Pair(a=sides[0], b=sides[1], rows=rows, ttft=overall, verdict=verdict)


def _waves(result: Result, target: str) -> dict[int, dict[int, Cell]]:
    """Cells of a target by wave size and repeat."""
    found: dict[int, dict[int, Cell]] = {}
    for cell in result.cells:
        if cell.target == target:
            found.setdefault(cell.concurrency, {})[cell.repeat] = cell
    return found


def _times(cell: Cell) -> Times:
    seen: Counter[int] = Counter()
    times: Times = {}
    for request in cell.requests:
        times[request.session, seen[request.session]] = request.ttft_s
        seen[request.session] += 1
    return times


def _sample(first: Sequence[Times], second: Sequence[Times]) -> tuple[Sample, Sample] | None:
    """Paired times of every repeat; None where one failed, or where two waves share no request."""
    pairs = [[(a[key], b[key]) for key in a if key in b] for a, b in zip(first, second, strict=True)]
    good = [[(x, y) for x, y in repeat if x and y] for repeat in pairs]
    if good != pairs or not all(good):
        return None
    return [[x for x, _ in repeat] for repeat in good], [[y for _, y in repeat] for repeat in good]


def _figures(result: Result, target: str, size: int, cells: Any) -> Figures:
    summary: Summary = next(s for s in result.summary if (s.target, s.concurrency) == (target, size))
    times = [request.ttft_s for cell in cells for request in cell.requests if request.ttft_s is not None]
    return Figures(
        ttft_s=summary.ttft_s,
        read_bytes_per_s=summary.read_bytes_per_s,
        restored_tokens_per_s=summary.restored_tokens_per_s,
        ttft_histogram=histogram(np.array(times)) if times else [],
    )


def _side(of: tuple[str, Result], target: str, with_file: bool) -> Side:
    file, result = of
    mine = [summary for summary in result.summary if summary.target == target]
    emulated = mine[0].emulated
    name = f"{target} (emulated)" if emulated else target
    return Side(
        name=f"{name} of {file}" if with_file else name,
        file=file,
        target=target,
        emulated=emulated,
        version=result.version,
        node=result.host.get("node"),
        seed=result.seed,
        cold="proven" if all(summary.cold == "proven" for summary in mine) else "not proven",
    )


def verdict_of(a: str, b: str, rows: Sequence[Row], overall: Effect | None) -> str:
    """One sentence: which is faster and by how much, no difference, or why nothing can be said."""
    if overall is None:
        sizes = ", ".join(str(row.concurrency) for row in rows if row.ttft is None)
        return f"no verdict: requests failed, or none could be paired, at concurrency {sizes}"
    if overall.noise is None:
        return (
            f"no verdict: {b} takes {overall.ratio:.3f} times as long as {a} to the first token, but from one repeat "
            "no noise is known; run more repeats"
        )
    alone = [row for row in rows if row.ttft and row.ttft.claimed]
    repeats = f"{overall.repeats} repeats, {overall.pairs} pairs of requests"
    if not overall.claimed:
        parts = "; ".join(f"at {row.concurrency} alone {_times_as_long(row.ttft)}" for row in alone if row.ttft)
        return (
            f"no difference: {b} takes {overall.ratio:.3f} times as long as {a} to the first token, within the noise "
            f"of {overall.noise:.1%} ({repeats})" + (f", though {parts}" if parts else "")
        )
    word = "slower" if overall.ratio > 1 else "faster"
    return f"{b} is {word} than {a}: {_times_as_long(overall)} to the first token ({repeats})"


def _times_as_long(effect: Effect) -> str:
    return f"{effect.ratio:.2f} times as long ({effect.low:.2f} to {effect.high:.2f} at {CONFIDENCE:.0%})"


def _notes(a: tuple[str, Result], b: tuple[str, Result], pairs: Sequence[Pair]) -> list[str]:
    """What stands against believing the comparison."""
    notes = []
    if a[1] != b[1]:
        notes.append(
            "two runs at different times: what changed on the machine between them is in the difference; targets of "
            "one job are interleaved"
        )
    hosts: list[Mapping[str, Any]] = [a[1].host, b[1].host]
    for fact in ("node", "kernel", "processor"):
        if hosts[0].get(fact) != hosts[1].get(fact):
            notes.append(f"{fact} differs: {hosts[0].get(fact)} and {hosts[1].get(fact)}")
    if a[1].version != b[1].version:
        notes.append(f"version differs: {a[1].version} and {b[1].version}")
    for pair in pairs:
        if pair.a.emulated != pair.b.emulated:
            notes.append(f"{pair.a.name} against {pair.b.name}: one is emulated and one measured")
        notes += [
            f"{side.name}: its reads are not proven to be cold" for side in (pair.a, pair.b) if side.cold != "proven"
        ]
    for file, result in (a, b):
        notes += [f"{file}: {line}" for line in result.failures]
    return list(dict.fromkeys(notes))
