"""`rewarm report RESULT.. -o report.html`: results and plans as one page that opens from disk."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console

from rewarm.cli.bench_command import check_out
from rewarm.cli.output import Output, output_options, write_file
from rewarm.report import read_result, render
from rewarm.units import format_size


class Report(msgspec.Struct, frozen=True):
    """What was written."""

    path: str
    results: list[str]
    page_bytes: int


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path())
@click.option("-o", "out", type=click.Path(), default="report.html", show_default=True, help="The page to write.")
@output_options
def command(output: Output, results: tuple[str, ...], out: str) -> None:
    """Make one HTML page of results of `rewarm bench -o` and plans of `rewarm plan -o`, in any mixture.

    The page is complete in itself: it opens from disk, loads nothing, and holds every result as JSON too.
    """
    check_out(out)
    page = render([read_result(Path(path).read_bytes(), path) for path in results]).encode()
    write_file(out, page)
    report = Report(out, list(results), len(page))

    def show(console: Console) -> None:
        console.print(f"wrote {out} ({format_size(len(page))}): open it in a browser")

    output.answer(report, show)
