"""`rewarm trace`: what a trace asks for, and what a cache of each size would hit."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rewarm.cli.output import Output, output_options
from rewarm.errors import ConfigError
from rewarm.units import format_duration
from rewarm.workload import open_trace
from rewarm.workload.summary import TraceSummary, summarise


@click.command()
@click.argument("file", type=click.Path())
@click.option("--at", "at_", metavar="TOKENS,..", help="LRU capacities in tokens, for example 1e6,3e6,10e6.")
@click.option("--sample", type=float, default=1.0, help="Share of the sessions to read blocks of, for huge traces.")
@output_options
def command(output: Output, file: str, at_: str | None, sample: float) -> None:
    """Show the hit curve of a trace.

    FILE is a Mooncake JSON lines file, a session file of a coding agent (or a directory of them), an Azure CSV, LMCache
    lookup hashes (or a directory of them) or a server log with LMCache's lookups, or a recording of Rewarm; plain or
    .gz. Hit rates are exact for every capacity; with --sample they come with their error.
    """
    at = None if at_ is None else [_tokens(text) for text in at_.split(",")]
    trace = open_trace(file)
    start = _bytes_read()
    with output.progress("reading", total=_size(Path(file)), unit="B", poll=lambda: _bytes_read() - start):
        summary = summarise(trace, at=at, sample_rate=sample)
    output.answer(summary, lambda console: _show(console, summary))


def _bytes_read() -> int:
    """Bytes that this process has read from files, cached or not; 0 where the kernel does not say."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0
    return int(fields["rchar"])


def _size(path: Path) -> int:
    """Bytes of a file, or of the files of a directory."""
    files = [entry for entry in path.iterdir() if entry.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _tokens(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--at: cannot read {text!r} as a number of tokens; write for example 1e6,3e6") from None


def _show(console: Console, summary: TraceSummary) -> None:
    console.print(
        f"{summary.path}: {summary.requests:,} requests in {format_duration(summary.duration_s)} ({summary.format}), "
        f"{summary.mean_input_tokens:,.0f} tokens in and {summary.mean_output_tokens:,.0f} out on average"
    )
    if summary.infinite_cache is not None:
        _show_curve(console, summary)
    if summary.observed_token_hit_rate is not None:
        console.print(f"hits reported by the trace itself: {summary.observed_token_hit_rate:.1%} of the input tokens")
    for note in summary.notes:
        console.print(f"note: {note}")


def _show_curve(console: Console, summary: TraceSummary) -> None:
    console.print(
        f"{summary.blocks:,} blocks of {summary.block_tokens} tokens, {summary.distinct_blocks:,} distinct"
        + ("" if summary.sampled_share == 1 else f"; curve from {summary.sampled_share:.1%} of them, whole sessions")
    )
    table = Table("cached tokens (LRU)", "tokens hit", "blocks hit")
    for column in table.columns:
        column.justify = "right"
    for point in summary.lru:
        table.add_row(
            f"{point.cached_tokens:,.0f}", _rate(point.token_hit_rate, point.token_hit_rate_error),
            f"{point.block_hit_rate:.1%}",
        )  # fmt: skip
    infinite = summary.infinite_cache
    if infinite is not None:
        tokens = _rate(infinite.token_hit_rate, infinite.token_hit_rate_error)
        table.add_row("no limit", tokens, f"{infinite.block_hit_rate:.1%}")
    console.print(table)
    if summary.reuse_interval_s:
        shown = ", ".join(
            f"{name} {format_duration(value) if value else '0 s'}" for name, value in summary.reuse_interval_s.items()
        )
        console.print(f"time between two uses of a block: {shown}")


def _rate(rate: float, error: float) -> str:
    return f"{rate:.1%}" if error == 0 else f"{rate:.1%} ± {error:.1%}"
