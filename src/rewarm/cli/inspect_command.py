"""`rewarm inspect URL`: what a pool holds, from its logs and files; nothing is changed and no block is read."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import media_urls, require_pool
from rewarm.cli.render import print_struct
from rewarm.store.inspection import Inspection, inspect_pool
from rewarm.store.opening import parse_url
from rewarm.store.raw.inspection import RawInspection, inspect_raw


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
        found = [_inspect(medium, segments=segments) for medium in media_urls(url)]
    output.answer(found[0] if len(found) == 1 else {"media": found}, lambda console: _render(console, found))


def _inspect(url: str, *, segments: bool) -> Inspection | RawInspection:
    location = parse_url(url)
    return inspect_raw(location.path) if location.scheme == "block" else inspect_pool(url, segments=segments)


def _render(console: Console, found: Sequence[Inspection | RawInspection]) -> None:
    for inspection in found:
        print_struct(console, inspection)
