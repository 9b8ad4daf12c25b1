"""What the document of a live result has in place of bytes and media: servers, tokens, and the client's own load."""

from __future__ import annotations

from typing import Any

from rewarm.bench.result import Result
from rewarm.report.bench_charts import BenchCharts
from rewarm.report.model import Cell, Row, Source, Table, Tile


def live_tiles(result: Result, source: Source, place: int) -> tuple[Tile, ...]:
    """The large figures of a summary."""
    row = result.summary[place]
    where = f"{BenchCharts.label(row.target, row.emulated)}, {row.concurrency} at once"

    def at(kind: str, *path: str) -> Any:
        return source.at(kind, "summary", place, *path)

    beside: tuple[Cell, ...] = ("no recompute to compare with",)
    if row.recompute is not None:
        beside = ("recompute ", at("seconds", "recompute", "ttft_s", "p50"), f" ({row.recompute.source})")
    return (
        Tile(f"Median time to first token: {where}", at("seconds", "ttft_s", "p50"), beside),
        Tile("Time per output token", at("seconds", "live", "tpot_s", "p50"),
             ("end of the answer after ", at("seconds", "live", "e2e_s", "p50"))),
        Tile("Output tokens per second", at("count", "live", "output_tokens_per_s"),
             (at("count", "restored_tokens_per_s"), " restored per second")),
        Tile("Prompt tokens from a cache", at("share", "live", "cached_share"),
             (at("count", "misses"), " requests failed")),
    )  # fmt: skip


LIVE_COLUMNS = {
    "TTFT p50": ("seconds", "ttft_s", "p50"), "p90": ("seconds", "ttft_s", "p90"), "p99": ("seconds", "ttft_s", "p99"),
    "spread": ("share", "spread"), "TPOT p50": ("seconds", "live", "tpot_s", "p50"),
    "E2E p50": ("seconds", "live", "e2e_s", "p50"), "output tokens/s": ("count", "live", "output_tokens_per_s"),
    "cached": ("share", "live", "cached_share"), "recompute p50": ("seconds", "recompute", "ttft_s", "p50"),
    "failed": ("count", "misses"), "cold": ("word", "cold"),
}  # fmt: skip
"""Columns of the table of targets, by heading: kind and path in a summary."""


def client_table(result: Result, source: Source) -> Table:
    """How each cell was made cold, and how busy the load client was."""
    rows: list[Row] = []
    for place, cell in enumerate(result.cells):

        def at(kind: str, *path: str, place: int = place) -> Any:
            return source.at(kind, "cells", place, *path)

        label, limits = BenchCharts.label(cell.target, cell.emulated), cell.live.client.limits if cell.live else []
        rows.append(
            (
                f"{label}, {cell.concurrency} at once, repeat {cell.repeat + 1}",
                at("word", "cold"),
                at("count", "live", "prompt_tokens"),
                at("count", "live", "cached_tokens"),
                at("share", "live", "client", "cpu_share"),
                at("seconds", "live", "client", "lag_s", "p99"),
                at("text", "live", "client", "limits") if limits else "nothing: the numbers are the server's",
                at("text", "cold_reason"),
            )
        )
    columns = (
        "cell", "verdict", "prompt tokens", "cached", "client's CPU", "event loop late (p99)",
        "what is the client's", "how it was made cold",
    )  # fmt: skip
    return Table(
        "Every cell: tokens as the server reported them, and the client itself", columns, tuple(rows), folded=True
    )


def server_table(result: Result, source: Source) -> Table:
    """The servers as the job names them."""
    keys = ("url", "model", "api", "cold", "restart", "cache_tokens", "connections")
    rows: list[Row] = [
        (name, *(source.at("text", "job", "servers", name, key) for key in keys))
        for name in result.job.get("servers", {})
    ]
    return Table("Given: the servers", ("server", *(key.replace("_", " ") for key in keys)), tuple(rows))
