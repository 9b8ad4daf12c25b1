"""Shows a result of cold recovery as people read it: targets down, concurrency across, recompute beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from rewarm.bench.result import Recompute, Result, Summary
from rewarm.units import format_rate, format_size

T = TypeVar("T")

_COUNTED = {
    "wave": "requests restored together",
    "closed": "clients",
    "open": "requests of the stream",
    "trace": "requests of the trace",
}
_COLD = {"proven": "proven", "not_provable": "not provable", "failed": "FAILED"}


def show_result(console: Console, result: Result) -> None:
    """Print sizes, media, the table, what it says, and everything that is wrong with it."""
    console.print(_headline(result))
    for name, medium in result.media.items():
        if medium:
            on = " on ".join(filter(None, (medium["file_system"], medium["device"] or medium["source"])))
            behind = f", behind it {medium['backing']}" if medium["backing"] else ""
            console.print(f"{_label(result, name)}: {medium['path']}, {on}{behind}; {_ceiling(result, name)}")
    recompute = next((summary.recompute for summary in result.summary if summary.recompute), None)
    if recompute and recompute.mfu is not None:
        console.print(
            f"recompute ({recompute.source}): {recompute.gpus} x {recompute.gpu} at {recompute.mfu:.0%} of peak"
        )
    console.print(_table(result))
    for line in result.verdicts:
        console.print(line)
    for line in result.notes:
        console.print(f"note: {line}")


def _headline(result: Result) -> str:
    """What was asked for."""
    sizes, job = result.sizes, result.job
    what = f"cold recovery of {job['model']}" if job["model"] else "cold recovery on live servers"
    each = f"{sizes['restored_tokens']:,} tokens a request"
    if "bytes_per_session" in sizes:
        each += f" ({format_size(sizes['bytes_per_session'])} in {sizes['blocks_per_session']} blocks)"
    return f"{what}: {each}, {_SHAPES[job['shape']]}, {sizes['sessions']} sessions, {job['repeats']} repeat(s)"


_SHAPES = {
    "wave": "all at once",
    "closed": "closed clients",
    "open": "an open stream",
    "trace": "at the times of a trace",
}


def _label(result: Result, name: str) -> str:
    emulated = any(summary.emulated for summary in result.summary if summary.target == name)
    return f"{name} ({'emulated' if emulated else 'measured'})"


def _ceiling(result: Result, name: str) -> str:
    readings = [ceiling for ceiling in result.ceiling if ceiling.target == name]
    if not readings:
        return "no ceiling measured"
    top = max(readings, key=lambda ceiling: ceiling.read_bytes_per_s)
    how = "held at" if top.emulated else "raw reads reach"
    return f"{how} {format_rate(top.read_bytes_per_s)}"


def _table(result: Result) -> Table:
    groups: dict[str, list[Summary]] = {}
    for summary in result.summary:
        groups.setdefault(summary.target, []).append(summary)
    table = Table("target", "figure", box=box.SIMPLE_HEAD, title=f"medians, by {_COUNTED[result.job['shape']]}")
    for summary in next(iter(groups.values())):
        table.add_column(str(summary.concurrency), justify="right")
    shown_recompute = False
    for name, group in groups.items():
        _add(table, _label(result, name), _FIGURES if group[0].live is None else _LIVE_FIGURES, group)
        recompute = [summary.recompute for summary in group if summary.recompute]
        measured = any(each.mfu is None for each in recompute)
        if len(recompute) == len(group) and (measured or not shown_recompute):
            where = f"{name}, " if measured else ""
            _add(table, f"{where}recompute ({recompute[0].source})", _RECOMPUTE_FIGURES, recompute)
            shown_recompute = True
    return table


_FIGURES: dict[str, Callable[[Summary], str]] = {
    "TTFT p50, s": lambda s: _seconds(s.ttft_s.p50),
    "TTFT p90, s": lambda s: _seconds(s.ttft_s.p90),
    "TTFT p99, s": lambda s: _seconds(s.ttft_s.p99),
    "restored tokens/s": lambda s: "-" if s.restored_tokens_per_s is None else f"{s.restored_tokens_per_s:,.0f}",
    "read, GB/s": lambda s: "-" if s.read_bytes_per_s is None else f"{s.read_bytes_per_s / 1e9:.2f}",
    "share of ceiling": lambda s: "-" if s.ceiling_share is None else f"{s.ceiling_share:.0%}",
    "CPU s/GB": lambda s: "-" if s.cpu_s_per_gb is None else f"{s.cpu_s_per_gb:.3f}",
    "missed blocks": lambda s: f"{s.misses:,}",
    "cold": lambda s: _COLD[s.cold],
}

_LIVE_FIGURES: dict[str, Callable[[Summary], str]] = {
    **{figure: show for figure, show in _FIGURES.items() if figure.startswith("TTFT")},
    "TPOT p50, s": lambda s: "-" if s.live is None else _seconds(s.live.tpot_s.p50),
    "E2E p50, s": lambda s: "-" if s.live is None else _seconds(s.live.e2e_s.p50),
    "output tokens/s": lambda s: "-" if s.live is None else f"{s.live.output_tokens_per_s:,.0f}",
    "cached, reported": lambda s: (
        "-" if s.live is None or s.live.cached_share is None else f"{s.live.cached_share:.0%}"
    ),
    "failed requests": lambda s: f"{s.misses:,}",
    "whose numbers": lambda s: "the CLIENT's" if s.live and s.live.client_limits else "the server's",
    "cold": lambda s: _COLD[s.cold],
}
"""What a table says about a live server."""

_RECOMPUTE_FIGURES: dict[str, Callable[[Recompute], str]] = {
    "TTFT p50, s": lambda r: _seconds(r.ttft_s.p50),
    "TTFT p90, s": lambda r: _seconds(r.ttft_s.p90),
    "TTFT p99, s": lambda r: _seconds(r.ttft_s.p99),
    "prefilled tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
}


def _add(table: Table, label: str, figures: dict[str, Callable[[T], str]], group: list[T]) -> None:
    """One line for each figure of one target; every line says whose it is."""
    last = next(reversed(figures))
    for figure, show in figures.items():
        table.add_row(label, figure, *map(show, group), end_section=figure == last)


def _seconds(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return "failed"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"
