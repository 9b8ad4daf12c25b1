"""A plan as text: the verdict, then the tables behind it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rewarm.plan.result import Plan, Sharing
from rewarm.units import format_duration, format_rate, format_size


def show_plan(console: Console, plan: Plan, inputs: bool) -> None:
    """Print a plan. `inputs` adds the list of every input."""
    console.print(plan.verdict.sentence, style="bold", markup=False, soft_wrap=True)
    console.print(
        f"\n{plan.model}: {plan.bytes_per_token:,} bytes per token, {format_size(plan.context_bytes)} for "
        f"{plan.context_tokens:,} tokens"
    )
    for row in plan.calibration:
        worst = max((abs(residual.error) for residual in row.residuals), default=0.0)
        console.print(
            f"calibrated {row.target}: fixed {format_duration(row.fixed_s)}, {format_rate(row.bytes_per_s)}"
            f"{' (the probed peak)' if row.at_peak else ''}, restores {row.order}; largest error {worst:.1%}"
        )
    _cells(console, plan)
    _effects(console, plan)
    _saturation(console, plan)
    _break_even(console, plan)
    for sharing in plan.sharing:
        _sharing(console, sharing)
    _capacity(console, plan)
    _writes(console, plan)
    _money(console, plan)
    _inputs(console, plan, inputs)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)


def _table(console: Console, title: str, *columns: str) -> Table:
    """A table below its title, which may be wider."""
    console.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _cells(console: Console, plan: Plan) -> None:
    table = _table(
        console,
        "Times and throughput",
        "medium",
        "load",
        "TTFT p50",
        "p90",
        "p99",
        "TPOT",
        "tokens/s",
        "hits",
        "duty",
        "why",
    )
    table.columns[-1].justify = "left"
    for cell in plan.cells:
        load = f"{cell.concurrency} at once" if cell.concurrency is not None else f"{cell.requests_per_s:.3g} req/s"
        table.add_row(
            cell.medium,
            load,
            *(format_duration(value) for value in (cell.ttft_s.p50, cell.ttft_s.p90, cell.ttft_s.p99)),
            "" if cell.tpot_s is None else format_duration(cell.tpot_s),
            f"{cell.output_tokens_per_s:,.1f}",
            f"{cell.hit_tokens_share:.0%}",
            f"{cell.restoring_share:.0%}",
            cell.reason,
        )
    console.print(table)


_EFFECTS_SHOWN = 4
"""Inputs per candidate in the text; the JSON has all."""


def _effects(console: Console, plan: Plan) -> None:
    if not plan.effects:
        return
    table = _table(
        console, "What a 10 % larger input does, at the heaviest load",
        "medium", "input", "TTFT p90", "tokens/s", "saturation", "cost",
    )  # fmt: skip
    shown: dict[str, int] = {}
    for row in plan.effects:
        shown[row.medium] = shown.get(row.medium, 0) + 1
        if shown[row.medium] <= _EFFECTS_SHOWN:
            changes = (
                row.ttft_p90, row.output_tokens_per_s, row.saturation_requests_per_s, row.usd_per_million_tokens
            )  # fmt: skip
            table.add_row(row.medium, row.input, *(f"{change:+.1%}" for change in changes))
    console.print(table)


def _saturation(console: Console, plan: Plan) -> None:
    table = _table(
        console, "Where each ends", "medium", "requests/s", "first to end", "knee per node", "GPU s per request"
    )
    for row in plan.saturation:
        table.add_row(
            row.medium, f"{row.requests_per_s:.3g}", row.limit, f"{row.knee_concurrency:.1f}",
            f"{row.gpu_s_per_request:.3g}",
        )  # fmt: skip
    console.print(table)


def _break_even(console: Console, plan: Plan) -> None:
    table = _table(
        console, f"Loading against computing {plan.context_tokens:,} tokens",
        "medium", "load", "compute", "both at once", "has", "needs at least", "shortest worth loading",
    )  # fmt: skip
    for row in plan.break_even:
        table.add_row(
            row.medium,
            *(format_duration(value) for value in (row.load_s, row.compute_s, row.both_s)),
            format_rate(row.medium_bytes_per_s),
            "never pays" if row.bandwidth_bytes_per_s is None else format_rate(row.bandwidth_bytes_per_s),
            "none" if row.length_tokens is None else f"{row.length_tokens:,} tokens",
        )
    console.print(table)


def _sharing(console: Console, row: Sharing) -> None:
    console.print(f"\n{row.verdict}", soft_wrap=True)
    table = _table(
        console, f"Nodes that {row.array} serves better than {row.local} in every node", "duty", "by median", "by mean",
        "still better than recompute",
    )  # fmt: skip
    for point in row.curve:
        nodes = (point.nodes_by_median, point.nodes_by_mean, point.nodes_against_recompute)
        table.add_row(f"{point.duty:.0%}", *("any" if count is None else str(count) for count in nodes))
    console.print(table)
    for what, values in (("ports", row.by_ports), ("drives", row.by_drives), ("Gb/s per port", row.by_link)):
        if values:
            shown = ", ".join(f"{name}: {duty:.1%}" for name, duty in values.items())
            console.print(f"duty up to which the array is faster for {row.nodes}, by {what}: {shown}")


def _capacity(console: Console, plan: Plan) -> None:
    if not plan.capacity:
        return
    table = _table(
        console, "Cache for a hit rate, one trace", "tokens hit", "of what is possible", "cached tokens", "size"
    )
    for row in plan.capacity:
        table.add_row(
            f"{row.token_hit_rate:.1%}", f"{row.share_of_possible:.0%}", f"{row.cached_tokens:,}",
            format_size(row.cached_bytes),
        )  # fmt: skip
    console.print(table)


def _writes(console: Console, plan: Plan) -> None:
    if not plan.writes:
        return
    table = _table(
        console, "Writes", "medium", "admission", "per day", "written", "tokens hit", "drive writes per day", "rated",
        "rated life",
    )  # fmt: skip
    for row in plan.writes:
        table.add_row(
            row.medium,
            row.admission,
            format_size(row.bytes_per_day),
            f"{row.written_share:.0%}",
            "" if row.token_hit_rate is None else f"{row.token_hit_rate:.1%}",
            "" if row.drive_writes_per_day is None else f"{row.drive_writes_per_day:.2f}",
            "" if row.rated_drive_writes_per_day is None else f"{row.rated_drive_writes_per_day:g}",
            "" if row.years is None else f"{row.years:.1f} years",
        )
    console.print(table)


def _money(console: Console, plan: Plan) -> None:
    table = _table(
        console,
        "Money",
        "medium",
        "GPU per hour",
        "storage per hour",
        "per million tokens",
        "keep a token asked for within",
    )
    for row in plan.money:
        table.add_row(
            row.medium,
            f"{row.gpu_usd_per_hour:.2f} USD",
            f"{row.storage_usd_per_hour:.3f} USD",
            f"{row.usd_per_million_tokens:.3g} USD",
            "" if row.break_even_interval_s is None else f"{row.break_even_interval_s / 86400:.3g} days",
        )
    console.print(table)


def _inputs(console: Console, plan: Plan, every: bool) -> None:
    console.print()
    for origin in ("measured", "given", "assumed"):
        names = [row for row in plan.inputs if row.origin == origin]
        if every and names:
            table = _table(console, f"Inputs, {origin}", "input", "value", "source")
            for row in names:
                table.add_row(row.name, _value(row.value), row.source)
            console.print(table)
        elif names:
            console.print(f"{origin}: {', '.join(row.name for row in names)}", soft_wrap=True)


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
