"""`rewarm demo`: the main job on this machine's own disk, from an empty directory to a table and a verdict."""

from __future__ import annotations

from pathlib import Path

import click

from rewarm.bench.demo import run_demo
from rewarm.cli.bench_command import check_out, finish
from rewarm.cli.measuring import interruptible, stages_of
from rewarm.cli.output import Output, output_options


@click.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("."),
    help="A directory on the medium to measure.  [default: the current one]",
)
@click.option("-o", "out", type=click.Path(), help="Write the whole result as JSON to this file.")
@click.option("--report", type=click.Path(), default="report.html", show_default=True, help="The HTML page to write.")
@output_options
def command(output: Output, directory: Path, out: str | None, report: str) -> None:
    """Show on this machine what restoring KV cache from its disk is worth.

    Stores sessions of a small model, forgets them in memory, and restores 8, 16 and 32 at once; then the same on two
    emulated media. Real reads past the page cache, at most 3 GB on disk and about two minutes; all of it is removed.
    Ends with a table, a verdict, and a page with charts.
    """
    for path in (out, report):
        check_out(path)
    with interruptible(output):
        result = run_demo(directory, stages_of(output), output.note)
    finish(output, result, out, report)
