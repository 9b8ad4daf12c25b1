"""`rewarm inspect URL`: what a pool holds, from its logs and files; nothing is changed and no block is read."""

from __future__ import annotations

import click
from rich.console import Console

from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import media_urls, require_pool
from rewarm.cli.render import print_struct
from rewarm.store.inspection import Inspection, inspect_pool


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--segments", is_flag=True, help="List every segment, oldest first: the order of eviction.")
@output_options
def command(output: Output, url: str, segments: bool) -> None:
    """Show capacity, use, device, namespaces and writers of the pool at URL; of several drives, of each of them.

    Hits are counted by the processes that use a pool: see their statistics and metrics.
    """
    require_pool(url)
    with output.progress("reading logs"):
        found = [inspect_pool(medium, segments=segments) for medium in media_urls(url)]
    output.answer(found[0] if len(found) == 1 else {"media": found}, lambda console: _render(console, found))


def _render(console: Console, found: list[Inspection]) -> None:
    for inspection in found:
        print_struct(console, inspection)
