"""`rewarm inspect URL`: what a pool holds, from its logs and files; nothing is changed and no block is read."""

from __future__ import annotations

import click

from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import require_pool
from rewarm.cli.render import print_struct
from rewarm.store.inspection import inspect_pool


@click.command()
@click.argument("url", type=STORE_URL)
@output_options
def command(output: Output, url: str) -> None:
    """Show capacity, use, device, namespaces and writers of the pool at URL."""
    require_pool(url)
    with output.progress("reading logs"):
        inspection = inspect_pool(url)
    output.answer(inspection, lambda console: print_struct(console, inspection))
