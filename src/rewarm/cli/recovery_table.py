"""Shows a result of cold recovery as people read it: targets down, concurrency across, recompute beside them."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from rewarm.bench.result import Percentiles, Recompute, Result, Summary
from rewarm.units import format_rate, format_size

_COLD = {"proven": "proven", "not_provable": "not provable", "failed": "FAILED"}


def show_result(console: Console, result: Result) -> None:
    """Print sizes, media, the table, what it says, and everything that is wrong with it."""
    sizes, job = result.sizes, result.job
    console.print(
        f"cold recovery of {job['model']}: {sizes['restored_tokens']:,} tokens a request "
        f"({format_size(sizes['bytes_per_session'])} in {sizes['blocks_per_session']} blocks), "
        f"{sizes['sessions']} sessions, {job['repeats']} repeats"
    )
    for name, medium in result.media.items():
        if medium:
            on = " on ".join(filter(None, (medium["file_system"], medium["device"] or medium["source"])))
            behind = f", behind it {medium['backing']}" if medium["backing"] else ""
            console.print(f"{_label(result, name)}: {medium['path']}, {on}{behind}; {_ceiling(result, name)}")
    console.print(_table(result))
    for line in result.verdicts:
        console.print(line)
    for line in result.notes:
        console.print(f"note: {line}")


def _label(result: Result, name: str) -> str:
    emulated = result.job["targets"][name]["emulated_bytes_per_s"] is not None
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
    table = Table("target", "figure", title="median of the repeats, by requests restored together")
    for summary in next(iter(groups.values())):
        table.add_column(str(summary.concurrency), justify="right")
    shown_recompute = False
    for name, group in groups.items():
        _add_target(table, _label(result, name), group)
        if not shown_recompute and group[0].recompute:
            _add_recompute(table, [summary.recompute for summary in group if summary.recompute])
            shown_recompute = True
    return table


_FIGURES: dict[str, Callable[[Summary], str]] = {
    "TTFT p50 / p90 / p99, s": lambda s: _ttft(s.ttft_s),
    "restored tokens/s": lambda s: f"{s.restored_tokens_per_s:,.0f}",
    "read, share of ceiling": lambda s: f"{format_rate(s.read_bytes_per_s)}, {_percent(s.ceiling_share)}",
    "CPU s/GB": lambda s: "-" if s.cpu_s_per_gb is None else f"{s.cpu_s_per_gb:.3f}",
    "missed blocks": lambda s: f"{s.misses:,}",
    "cold": lambda s: _COLD[s.cold],
}


def _add_target(table: Table, label: str, group: list[Summary]) -> None:
    for figure, show in _FIGURES.items():
        table.add_row(label, figure, *map(show, group), end_section=figure == "cold")


def _add_recompute(table: Table, group: list[Recompute]) -> None:
    label = f"recompute, {group[0].gpus} x {group[0].gpu} ({group[0].source})"
    table.add_row(label, "TTFT p50 / p90 / p99, s", *(_ttft(r.ttft_s) for r in group))
    table.add_row(label, "prefilled tokens/s", *(f"{r.tokens_per_s:,.0f}" for r in group), end_section=True)


def _ttft(ttft_s: Percentiles) -> str:
    return " / ".join("failed" if value is None else _seconds(value) for value in (ttft_s.p50, ttft_s.p90, ttft_s.p99))


def _seconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
