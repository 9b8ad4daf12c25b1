"""`rewarm probe`: the raw read and write ceiling of a medium, block size by bytes in flight."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from rewarm.bench.probe import ProbeResult, run_probe
from rewarm.cli import exits
from rewarm.cli.bench_command import check_out
from rewarm.cli.measuring import interruptible, stages_of
from rewarm.cli.output import Output, output_options, to_json, write_file
from rewarm.units import format_duration, format_rate, format_size


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Wear the media in first: writes most of the free space twice and more.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Order and contents of blocks.")
@click.option("-o", "out", type=click.Path(), help="Write the result, histograms included, as JSON to this file.")
@output_options
def command(output: Output, paths: tuple[Path, ...], full: bool, seed: int, out: str | None) -> None:
    """Measure what the medium under each of PATHS, directories, can do without a store, and all of them together.

    Writes a file of at most 1 GiB on each, reads and rewrites it past the page cache in half a minute, and removes it.
    At most 18 GiB are written on each, 34 when there are several; with --full as much as it takes to get steady.
    """
    check_out(out)
    with interruptible(output):
        result = run_probe(paths, stages_of(output), output.note, seed=seed, full=full)
    if out is not None:
        write_file(out, to_json(result) + "\n")
    output.answer(result, lambda console: _show(console, result))
    for line in result.failures:
        exits.show_error(line)
    if result.failures:
        click.get_current_context().exit(exits.FINDINGS)


def _show(console: Console, result: ProbeResult) -> None:
    for medium in result.media:
        on = " on ".join(filter(None, (medium.file_system, medium.device or medium.source)))
        console.print(f"{medium.path}, {on}, {format_size(medium.free_bytes)} free; through {result.device}")
    several = len(result.media) > 1
    named = ["medium"] if several else []
    table = Table(*named, "operation", "block", "in flight", "rate", "operations/s", "p50", "p99", "CPU s/GB", "cold")
    for column in table.columns[len(named) + 1 :]:
        column.justify = "right"
    for reading in result.readings:
        table.add_row(
            *([reading.path or "together"] if several else []),
            reading.operation,
            format_size(reading.block_bytes),
            format_size(reading.in_flight_bytes),
            format_rate(reading.bytes_per_s),
            f"{reading.operations_per_s:,.0f}",
            format_duration(reading.latency_s.p50),
            format_duration(reading.latency_s.p99),
            f"{reading.cpu_s_per_gb:.3f}",
            (reading.cold or "-").replace("_", " "),
        )
    console.print(table)
    console.print(
        f"ceiling: read {format_rate(result.read_bytes_per_s)}, write {format_rate(result.write_bytes_per_s)}"
    )
    for line in (*result.device_refusals, *result.notes):
        console.print(f"note: {line}")
