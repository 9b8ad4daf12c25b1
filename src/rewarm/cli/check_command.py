"""`rewarm check URL [--fix]`: verify every file and block of a pool, and with `--fix` repair or remove the damage."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from rewarm.bench.counters import take_snapshot
from rewarm.cli import exits
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import open_pool
from rewarm.cli.render import print_table
from rewarm.store.contract import CheckReport, Finding
from rewarm.store.opening import repair_pool_file
from rewarm.store.pool import POOL_FILE
from rewarm.units import format_size


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--fix", is_flag=True, help="Repair what can be repaired, remove what cannot.")
@output_options
def command(output: Output, url: str, fix: bool) -> None:
    """Verify every file and block of the pool at URL. Exit code 1 when something is left that loses data or space."""
    rebuilt = fix and repair_pool_file(url)
    with open_pool(url) as store:
        label = "repairing" if fix else "checking"
        start = _bytes_read()
        used_bytes = store.stats().used_bytes
        with output.progress(label, total=used_bytes or None, unit="B", poll=lambda: _bytes_read() - start):
            report = store.check(fix=fix)
    if rebuilt:
        found = Finding("damaged_pool_file", POOL_FILE, "rebuilt from the logs", fixed=True)
        report = msgspec.structs.replace(report, findings=[found, *report.findings])
    output.answer(report, lambda console: _render(console, report, fix))
    if not report.clean:
        raise click.exceptions.Exit(exits.FINDINGS)


def _bytes_read() -> int:
    """What the kernel says this process has read from media; 0 where it does not say."""
    return take_snapshot().process_read_bytes or 0


def _render(console: Console, report: CheckReport, fix: bool) -> None:
    print_table(console, "findings", report.findings)
    print_table(console, "notes", report.notes)
    verified = f"{report.blocks:,} blocks, {format_size(report.bytes_verified)} verified"
    if report.clean:
        console.print(f"clean: {verified}")
    elif fix:
        console.print(f"not clean: {len(report.findings)} findings, not all of them fixed; {verified}")
    else:
        console.print(f"not clean: {len(report.findings)} findings; {verified}; `check --fix` repairs what it can")
