"""`rewarm check URL [--fix]`: verify every file and block of a pool, and with `--fix` repair or remove the damage.

What is not of the format stays, unless `--remove-unknown` says otherwise.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.console import Console

from rewarm.bench.counters import take_snapshot
from rewarm.cli import exits
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import media_urls, open_pool
from rewarm.cli.render import print_table
from rewarm.store import housekeeping
from rewarm.store.contract import CheckReport, Finding
from rewarm.store.hosts import take_over
from rewarm.store.opening import parse_url, repair_pool_file
from rewarm.store.pool import POOL_FILE, Pool, read_facts
from rewarm.units import format_size


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--fix", is_flag=True, help="Repair what can be repaired, remove what the dead left behind.")
@click.option("--remove-unknown", is_flag=True, help="Remove names that are not of a pool's format, too.")
@click.option("--takeover", is_flag=True, help="Let this host have a pool that another host made and has unmounted.")
@output_options
def command(output: Output, url: str, fix: bool, remove_unknown: bool, takeover: bool) -> None:
    """Verify every file and block of the pool at URL. Exit code 1 when something is left that loses data or space."""
    media = media_urls(url)
    rebuilt = [medium for medium in media if fix and repair_pool_file(medium)]
    done = [d for medium in media for d in _prepare(medium, remove_unknown=remove_unknown, takeover=takeover)]
    with open_pool(url) as store:
        label = "repairing" if fix else "checking"
        start = _bytes_read()
        used_bytes = store.stats().used_bytes
        with output.progress(label, total=used_bytes or None, unit="B", poll=lambda: _bytes_read() - start):
            report = store.check(fix=fix)
    for medium in rebuilt:
        where = POOL_FILE if len(media) == 1 else f"{parse_url(medium).path}: {POOL_FILE}"
        done.append(Finding("damaged_pool_file", where, "rebuilt from the logs", fixed=True))
    findings = [*done, *report.findings]
    report = msgspec.structs.replace(report, findings=findings, clean=all(found.fixed for found in findings))
    output.answer(report, lambda console: _render(console, report, fix))
    if not report.clean:
        raise click.exceptions.Exit(exits.FINDINGS)


def _prepare(url: str, *, remove_unknown: bool, takeover: bool) -> list[Finding]:
    """What somebody has to ask for, and what was done."""
    root = Path(parse_url(url).path)
    facts = read_facts(root) if remove_unknown or takeover else None
    done: list[Finding] = []
    if facts and takeover and take_over(root, facts):
        done.append(Finding("other_host", POOL_FILE, f"made by {facts.host}, taken over", fixed=True))
    if facts and remove_unknown:
        done += housekeeping.remove_unknown(Pool(root, facts))
    return done


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
