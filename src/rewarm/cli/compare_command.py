"""`rewarm compare A.json B.json`: two results beside each other, with a verdict in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from rewarm.bench.compare import Comparison, Pair, Row, compare
from rewarm.bench.result import Result
from rewarm.cli import exits
from rewarm.cli.bench_command import check_out
from rewarm.cli.output import Output, output_options, to_json, write_file
from rewarm.errors import ConfigError
from rewarm.report import read_result
from rewarm.units import format_rate
from rewarm.workload.objective import Objective, parse_objective

HEAD = ("at once", "TTFT p50", "p90", "p99", "read", "B / A", "98 % interval", "noise")


@click.command()
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--a", "target_a", metavar="TARGET", help="Which target of A; all of the same name if left out.")
@click.option("--b", "target_b", metavar="TARGET", help="Which target of B; A and B may be one file.")
@click.option("--objective", "lines", multiple=True, metavar="LINE", help="For example 'ttft_p90 <= 2 s'; may repeat.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option("-o", "out", type=click.Path(), help="Write the comparison, histograms included, as JSON to this file.")
@output_options
def command(
    output: Output,
    a: str,
    b: str,
    target_a: str | None,
    target_b: str | None,
    lines: Sequence[str],
    markdown: bool,
    out: str | None,
) -> None:
    """Compare two results of `rewarm bench -o` that asked for the same.

    Paired by wave, repeat and request; says in one sentence which is faster and by how much, or that there is no
    difference beyond the noise. Objectives are those given here and those of the two jobs; one that A or B misses ends
    with 1, and so does a result that must not be believed.
    """
    check_out(out)
    results = _read(a), _read(b)
    objectives = _objectives(lines, results)
    found = compare((a, results[0]), (b, results[1]), (target_a, target_b), objectives)
    if out is not None:
        write_file(out, to_json(found) + "\n")
    output.answer(found, lambda console: console.print(markdown_of(found)) if markdown else _show(console, found))
    bad = [*found.missed, *(line for result in results for line in result.failures)]
    for line in dict.fromkeys(bad):
        exits.show_error(line)
    if bad:
        click.get_current_context().exit(exits.FINDINGS)


def _read(path: str) -> Result:
    result = read_result(Path(path).read_bytes(), path)
    if not isinstance(result, Result):
        raise ConfigError(f"{path} is a plan; compare takes two results of `rewarm bench -o`")
    return result


def _objectives(lines: Sequence[str], results: tuple[Result, Result]) -> list[Objective]:
    """Those of the command line and of both jobs, each once."""
    of_jobs = [result.job["objective"] for result in results if result.job.get("objective")]
    return [parse_objective(line) for line in dict.fromkeys([*lines, *of_jobs])]


def markdown_of(found: Comparison) -> str:
    """The comparison as Markdown: a table and a verdict for each pair, objectives, notes."""
    parts = []
    for pair in found.pairs:
        rows = [["", *HEAD], ["---"] * (len(HEAD) + 1), *(line for row in pair.rows for line in _lines(pair, row))]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
        parts.append(f"**{pair.verdict}**")
    parts += ["\n".join(f"* {judgement.sentence}" for judgement in found.objectives)] if found.objectives else []
    parts += ["\n".join(f"* note: {line}" for line in found.notes)] if found.notes else []
    return "\n\n".join(parts)


def _show(console: Console, found: Comparison) -> None:
    for pair in found.pairs:
        table = Table("", *HEAD, box=box.SIMPLE_HEAD)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in pair.rows:
            for cells in _lines(pair, row):
                table.add_row(*cells)
        console.print(table)
        console.print(pair.verdict)
    for judgement in found.objectives:
        console.print(judgement.sentence)
    for line in found.notes:
        console.print(f"note: {line}")


def _lines(pair: Pair, row: Row) -> list[list[str]]:
    """Two lines for one wave size: A, and B with the effect."""
    effect = row.ttft
    if effect is None:
        said = ["requests failed", "-", "-"]
    elif effect.noise is None:
        said = [f"{effect.ratio:.3f}", "one repeat", "-"]
    else:
        said = [f"{effect.ratio:.3f}", f"{effect.low:.3f} to {effect.high:.3f}", f"{effect.noise:.1%}"]
    found = []
    for letter, side, figures, rest in (("A", pair.a, row.a, [""] * 3), ("B", pair.b, row.b, said)):
        times = [_seconds(value) for value in (figures.ttft_s.p50, figures.ttft_s.p90, figures.ttft_s.p99)]
        rate = "-" if figures.read_bytes_per_s is None else format_rate(figures.read_bytes_per_s)
        found.append([f"{letter}: {side.name}", str(row.concurrency), *times, rate, *rest])
    return found


def _seconds(value: float | None) -> str:
    return "failed" if value is None else f"{value:.3f} s"
