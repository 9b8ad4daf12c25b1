"""A benchmark's result as a document: verdict, figures, charts, proof, and how to run it again."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from rewarm.bench.result import Result, Summary
from rewarm.report.bench_charts import BenchCharts
from rewarm.report.live_charts import LiveCharts
from rewarm.report.live_document import LIVE_COLUMNS, client_table, live_tiles, server_table
from rewarm.report.model import Cell, Document, Row, Section, Source, Table, Tile
from rewarm.units import format_size


def bench_document(result: Result, document: int) -> Document:
    """The document at a place in the report."""
    source = Source(document, msgspec.to_builtins(result))
    live = any(row.live for row in result.summary)
    charts = (LiveCharts if live else BenchCharts)(result, source)
    verdict, *findings = result.verdicts or ["This run has no verdict: there is nothing to compare with."]
    job = result.job
    return Document(
        title=f"Cold recovery of {job['model']}" if job["model"] else "Cold recovery on live servers",
        facts=_facts(result, charts.waves),
        verdict=verdict,
        verdict_rest="",
        findings=tuple(findings),
        alerts=tuple(result.failures),
        tiles=_tiles(result, source),
        sections=(
            Section(
                f"charts-{document}", "What was measured",
                "A solid line is measured on the medium or server itself, a dashed one on a medium that is emulated by "
                "holding real reads back to a rate, and a dotted one is modelled by a formula.",
                charts=charts.all(),
            ),
            Section(f"targets-{document}", "Targets by concurrency", tables=_target_tables(result, source)),
            _cold_section(result, source, live),
            Section(f"notes-{document}", "What to know about this run", lines=tuple(result.notes)),
            Section(
                f"inputs-{document}", "Inputs and their origin",
                "Measured: times, rates, bytes and tokens. Given: the job. Assumed: what recompute is modelled with, "
                "if it is not measured.",
                tables=_input_tables(result, source),
            ),
            Section(
                f"again-{document}", "How to reproduce it",
                "Save this as job.toml on a machine like the one above, check the paths, and run it.",
                code=job_toml(job),
            ),
        ),
        source=source.data,
    )  # fmt: skip


def _facts(result: Result, waves: list[int]) -> str:
    """What was asked for, in one line."""
    sizes, shape = result.sizes, result.job.get("shape", "wave")
    each = f"{sizes['restored_tokens']:,} tokens a request"
    if "bytes_per_session" in sizes:
        each += f" ({format_size(sizes['bytes_per_session'])} in {sizes['blocks_per_session']:,} blocks)"
    load = "at once" if shape == "wave" else f"in a cell, shape {shape}"
    return f"{each}, {sizes['sessions']:,} sessions, {', '.join(map(str, waves))} {load}"


def _cold_section(result: Result, source: Source, live: bool) -> Section:
    """The proof that reads were cold, or what was done instead."""
    if live:
        return Section(
            f"cold-{source.document}", "Were the servers cold, and whose numbers are these?",
            "What a server remembers is out of sight, so nothing here is proven cold; each cell says what was done, "
            "and what the server reported as cached. A number is the client's when the load client could not keep up.",
            tables=(client_table(result, source),),
        )  # fmt: skip
    return Section(
        f"cold-{source.document}", "Were the reads cold?",
        "A wave is proven cold when the bytes that the kernel counted for the process are those that the run "
        "accounts for, and the block device delivered at least as many.",
        tables=(_cold_table(result, source),),
    )  # fmt: skip


def _heaviest(result: Result) -> tuple[int, Summary] | None:
    """The largest wave of the first measured target, else of the first one."""
    rows = [(place, row) for place, row in enumerate(result.summary) if not row.emulated]
    rows = rows or list(enumerate(result.summary))
    rows = [(place, row) for place, row in rows if row.target == rows[0][1].target]
    return max(rows, key=lambda found: found[1].concurrency, default=None)


def _tiles(result: Result, source: Source) -> tuple[Tile, ...]:
    found = _heaviest(result)
    if found is None:
        return ()
    place, row = found
    if row.live is not None:
        return live_tiles(result, source, place)
    where = f"{BenchCharts.label(row.target, row.emulated)}, {row.concurrency} at once"

    def at(kind: str, *path: str) -> Any:
        return source.at(kind, "summary", place, *path)

    beside: tuple[Cell, ...] = ("no recompute to compare with",)
    if row.recompute is not None:
        beside = ("recompute ", at("seconds", "recompute", "ttft_s", "p50"), f" ({row.recompute.source})")
    return (
        Tile(f"Median time to first token: {where}", at("seconds", "ttft_s", "p50"), beside),
        Tile("Read throughput", at("rate", "read_bytes_per_s"), (at("share", "ceiling_share"), " of the raw ceiling")),
        Tile("Restored tokens per second", at("count", "restored_tokens_per_s"),
             (at("number", "cpu_s_per_gb"), " CPU seconds per GB")),
        Tile("Cold reads", at("word", "cold"), (at("count", "misses"), " blocks missed")),
    )  # fmt: skip


def _target_tables(result: Result, source: Source) -> tuple[Table, ...]:
    columns = {
        "TTFT p50": ("seconds", "ttft_s", "p50"), "p90": ("seconds", "ttft_s", "p90"),
        "p99": ("seconds", "ttft_s", "p99"), "spread": ("share", "spread"), "read": ("rate", "read_bytes_per_s"),
        "of ceiling": ("share", "ceiling_share"), "tokens/s": ("count", "restored_tokens_per_s"),
        "CPU s/GB": ("number", "cpu_s_per_gb"), "missed": ("count", "misses"), "cold": ("word", "cold"),
    }  # fmt: skip
    if any(row.live for row in result.summary):
        columns = LIVE_COLUMNS
    rows: list[Row] = [
        (
            BenchCharts.label(row.target, row.emulated),
            source.at("count", "summary", place, "concurrency"),
            *(source.at(kind, "summary", place, *path, missing="–") for kind, *path in columns.values()),
        )
        for place, row in enumerate(result.summary)
    ]
    medians = Table("Medians over the repeats", ("target", "at once", *columns), tuple(rows),
                    note="Spread: largest less smallest p50 of the repeats, over their median.")  # fmt: skip
    if not result.differences:
        return (medians,)
    compared = tuple(_difference_row(result, source, place) for place in range(len(result.differences)))
    return (
        medians,
        Table(
            "Differences and noise", ("target", "against", "at once", "times as fast", "noise", "beyond noise"),
            compared,
            note="Times as fast: median time to first token of the other over that of the target. Noise: the larger "
            "spread of the two; against recompute the target's.",
        ),
    )  # fmt: skip


def _difference_row(result: Result, source: Source, place: int) -> Row:
    row = result.differences[place]
    recompute = row.against == "recompute"
    return (
        BenchCharts.label(row.target, row.emulated),
        f"recompute ({_recompute_source(result)})" if recompute else BenchCharts.label(row.against, row.emulated),
        source.at("count", "differences", place, "concurrency"),
        source.at("ratio", "differences", place, "ratio"),
        source.at("share", "differences", place, "noise"),
        source.at("claim", "differences", place, "claimed"),
    )


def _recompute_source(result: Result) -> str:
    return next((row.recompute.source for row in result.summary if row.recompute), "modelled")


def _cold_table(result: Result, source: Source) -> Table:
    rows: list[Row] = []
    for place, cell in enumerate(result.cells):
        label = BenchCharts.label(cell.target, cell.emulated)
        counted = [source.at("bytes", "cells", place, "bytes", name) for name in _COUNTED]
        rows.append(
            (
                f"{label}, {cell.concurrency} at once, repeat {cell.repeat + 1}",
                source.at("word", "cells", place, "cold"),
                *counted,
                source.at("text", "cells", place, "compared"),
                source.at("text", "cells", place, "cold_reason"),
            )
        )
    columns = ("wave", "verdict", *(f"{name} bytes" for name in _COUNTED), "compared", "why")
    return Table("Bytes of every wave: what the run claims, what the kernel counted", columns, tuple(rows), folded=True)


_COUNTED = ("payload", "padding", "log", "kernel", "device")


def _input_tables(result: Result, source: Source) -> tuple[Table, ...]:
    media: list[Row] = [
        (name, *(source.at("text", "media", name, key) for key in ("path", "file_system", "device", "device_model")))
        for name, medium in result.media.items()
        if medium
    ]
    host = [(name.removesuffix("_bytes").replace("_", " "), source.at(_host_kind(name), "host", name))
            for name in result.host]  # fmt: skip
    given = [
        (key, source.at("answer" if isinstance(value, bool) else "text", "job", key))
        for key, value in result.job.items()
        if key not in _TABLES
    ]
    assumed = []
    for place, row in enumerate(result.summary[:1]):
        if row.recompute and row.recompute.mfu is not None:
            for key, kind in (("gpu", "text"), ("gpus", "number"), ("mfu", "share"),
                              ("break_even_bytes_per_s", "rate"), ("source", "text")):  # fmt: skip
                assumed.append((_RECOMPUTE[key], source.at(kind, "summary", place, "recompute", key)))
    tables = [
        Table("Measured on", ("medium", "path", "file system", "device", "model"), tuple(media)),
        Table("Host", ("fact", "value"), (*host, ("Rewarm", source.at("text", "version")))),
        Table("Given: the job", ("key", "value"), tuple(given)),
        server_table(result, source),
        Table("Assumed: recompute", ("input", "value"), tuple(assumed)),
    ]
    return tuple(table for table in tables if table.rows)


_RECOMPUTE = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "mfu": "share of peak FLOP/s",
    "break_even_bytes_per_s": "restoring pays above",
    "source": "prefill time is",
}


def _host_kind(name: str) -> str:
    return "size" if name.endswith("_bytes") else "text"


def job_toml(job: dict[str, Any]) -> str:
    """The job as the file that runs it again."""
    plain = [f"{key} = {_toml(value)}" for key, value in job.items() if key not in _TABLES and value is not None]
    lines = ["# rewarm bench job.toml -o result.json", *plain]
    for table in _TABLES:
        for name, target in job.get(table, {}).items():
            lines += ["", f"[{table}.{json.dumps(name)}]"]
            for key, value in target.items():
                if key == "emulated_bytes_per_s" and value is not None:
                    lines.append(f'rate = "{value:.17g} B/s"')
                elif value is not None and value != {}:
                    lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines)


_TABLES = ("targets", "servers")


def _toml(value: Any) -> str:
    """A value as TOML writes it; what it has no word for (null) is left out."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items() if v is not None)} }}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(each) for each in value if each is not None)}]"
    return json.dumps(value)
