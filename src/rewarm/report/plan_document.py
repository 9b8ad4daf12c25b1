"""A plan as a document: what to buy, what would change that, the charts behind it, and every input with its origin."""

from __future__ import annotations

import msgspec

from rewarm.plan.result import Input, Plan
from rewarm.report.model import Document, Row, Section, Source, Table, Tile
from rewarm.report.plan_charts import PlanCharts
from rewarm.units import format_size


def plan_document(plan: Plan, document: int) -> Document:
    """The document at a place in the report."""
    source = Source(document, msgspec.to_builtins(plan))
    charts = PlanCharts(plan, source)
    verdict, _, rest = plan.verdict.sentence.partition("; ")
    return Document(
        title=f"What to buy for {plan.model}",
        facts=f"{plan.bytes_per_token:,} bytes per token, {format_size(plan.context_bytes)} for "
        f"{plan.context_tokens:,} tokens; every figure here is modelled unless it says otherwise",
        verdict=verdict,
        verdict_rest=rest,
        findings=tuple(row.verdict for row in plan.sharing),
        alerts=() if plan.verdict.met else ("Nothing in this plan keeps to what was asked for.",),
        tiles=_tiles(plan, source),
        sections=(
            Section(f"charts-{document}", "The comparison", charts=charts.all()),
            Section(
                f"changes-{document}", "What would change the verdict",
                "Each input was moved alone until the answer changed.", tables=_change_tables(plan, source),
            ),
            Section(f"media-{document}", "Each candidate", tables=_media_tables(plan, source, charts)),
            Section(f"notes-{document}", "What to know about this plan", lines=plan.notes),
            Section(
                f"inputs-{document}", "Inputs and their origin",
                "Measured inputs come from a file or from the person who wrote the plan; given ones stand in the plan; "
                "assumed ones are defaults, with their source.",
                tables=_input_tables(plan, source),
            ),
            Section(
                f"again-{document}", "How to reproduce it",
                f"Made by Rewarm {plan.version}. A plan is a calculation: the same plan file gives the same figures on "
                "any machine. The inputs above, all of them, are what it was made from.",
                code="rewarm plan PLAN.toml -o plan.json\nrewarm report plan.json -o report.html",
            ),
        ),
        source=source.data,
    )  # fmt: skip


def _tiles(plan: Plan, source: Source) -> tuple[Tile, ...]:
    """The kind of the choice, then candidates by cost as the plan has them."""
    choice = Tile("Choice", source.at("text", "verdict", "kind"), (source.at("text", "verdict", "choice"),))
    return (
        choice,
        *(
            Tile(f"{row.medium} (modelled)", source.at("usd", "money", place, "usd_per_million_tokens"),
                 ("per million tokens",))
            for place, row in enumerate(plan.money)
        ),
    )  # fmt: skip


def _change_tables(plan: Plan, source: Source) -> tuple[Table, ...]:
    rows: tuple[Row, ...] = tuple(
        (row.input, *(source.at("text", "verdict", "changes", place, field) for field in ("verdict", "text")))
        for place, row in enumerate(plan.verdict.changes)
    )
    none: tuple[Row, ...] = (("no single input", "", ""),)
    nearest = Table("Inputs nearest to a change", ("input", "then", "in words"), rows or none)
    effects = tuple(
        (
            source.at("text", "effects", place, "medium"),
            source.at("text", "effects", place, "input"),
            *(source.at("change", "effects", place, field) for field in _EFFECT.values()),
        )
        for place in range(len(plan.effects))
    )
    if not effects:
        return (nearest,)
    note = "Relative changes at the heaviest load when one input is 10% larger; a share is 0.1 larger, at most 1."
    title = "What each input does to each candidate (modelled)"
    return (nearest, Table(title, ("medium", "input", *_EFFECT), effects, folded=True, note=note))


_EFFECT = {
    "TTFT p90": "ttft_p90",
    "output tokens/s": "output_tokens_per_s",
    "saturation": "saturation_requests_per_s",
    "cost": "usd_per_million_tokens",
}


def _media_tables(plan: Plan, source: Source, charts: PlanCharts) -> tuple[Table, ...]:
    tables = [
        _table("Where each ends", plan.saturation, "saturation", source, {
            "requests/s": ("number", "requests_per_s"), "first to end": ("text", "limit"),
            "knee, at once per node": ("number", "knee_concurrency"),
            "GPU s per request": ("number", "gpu_s_per_request"), "why": ("text", "reason"),
        }),
        _table(f"Loading against computing {plan.context_tokens:,} tokens", plan.break_even, "break_even", source, {
            "load": ("seconds", "load_s"), "compute": ("seconds", "compute_s"), "both at once": ("seconds", "both_s"),
            "has": ("rate", "medium_bytes_per_s"), "needs at least": ("rate", "bandwidth_bytes_per_s"),
            "shortest worth loading, tokens": ("count", "length_tokens"),
        }),
        _table("Writes", plan.writes, "writes", source, {
            "admission": ("text", "admission"), "per day": ("size", "bytes_per_day"),
            "written": ("share", "written_share"), "tokens hit": ("share", "token_hit_rate"),
            "drive writes per day": ("number", "drive_writes_per_day"),
            "rated": ("number", "rated_drive_writes_per_day"), "rated life": ("years", "years"),
        }),
    ]  # fmt: skip
    for place, row in enumerate(plan.sharing):
        for what, field in (("ports", "by_ports"), ("drives", "by_drives"), ("Gb/s per port", "by_link")):
            points = getattr(row, field)
            if points:
                rows = tuple((name, source.at("share", "sharing", place, field, name)) for name in points)
                nodes = "a node is" if row.nodes == 1 else f"{row.nodes} nodes are"
                title = f"{row.array}: duty up to which {nodes} served better, by {what}"
                tables.append(Table(title, (what, "duty"), rows))
    return tuple(table for table in tables if table.rows)


def _table(
    title: str, rows: tuple[msgspec.Struct, ...], field: str, source: Source, columns: dict[str, tuple[str, str]]
) -> Table:
    """A table of structs that each belong to a medium."""
    return Table(
        f"{title} (modelled)",
        ("medium", *columns),
        tuple(
            (
                source.at("text", field, place, "medium"),
                *(source.at(kind, field, place, name) for kind, name in columns.values()),
            )
            for place in range(len(rows))
        ),
    )  # fmt: skip


def _input_tables(plan: Plan, source: Source) -> tuple[Table, ...]:
    tables = []
    for origin in ("measured", "given", "assumed"):
        rows = tuple(
            (
                source.at("text", "inputs", place, "name"),
                source.at(_kind(row), "inputs", place, "value"),
                source.at("text", "inputs", place, "source"),
            )
            for place, row in enumerate(plan.inputs)
            if row.origin == origin
        )
        if rows:
            tables.append(Table(origin.capitalize(), ("input", "value", "source"), rows))
    return tuple(tables)


def _kind(row: Input) -> str:
    """How an input is written: its unit follows from what the plan file calls it."""
    if isinstance(row.value, bool):
        return "answer"
    if not isinstance(row.value, (int, float)):
        return "text"
    return _UNITS.get(row.name.rpartition(".")[2], "number")


_UNITS = {
    **dict.fromkeys(
        (
            "drive_read",
            "drive_write",
            "effective_read",
            "link",
            "node_link",
            "host_copy",
            "reader",
            "dram_read",
            "hbm_read",
        ),
        "rate",
    ),
    **dict.fromkeys(("capacity", "dram", "staging"), "capacity"),
    **dict.fromkeys(("fixed_time", "client_time", "think_time", "ttft_p50", "ttft_p90", "ttft_p99"), "seconds"),
    **dict.fromkeys(("gpu_hour", "flash_per_tb", "dram_per_gb", "drive_price", "extra_price"), "usd"),
}
"""The last part of an input's name -> the kind of its value."""
