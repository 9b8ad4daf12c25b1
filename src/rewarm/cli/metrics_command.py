"""`rewarm metrics URL..`: what pools hold, for Prometheus: as text, as a textfile, or on an endpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import click

from rewarm.cli.exporter import serve, text_of
from rewarm.cli.measuring import interruptible
from rewarm.cli.output import Output, output_options, write_file
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import media_urls, require_pool
from rewarm.errors import ConfigError, StorageError
from rewarm.store.inspection import Inspection, inspect_pool
from rewarm.store.metrics import Family, pool_families
from rewarm.tiers.opening import media_of

FRESH_S = 10.0
"""An inspection reads all logs of a pool; scrapes that come sooner than this get the last one again."""


@click.command()
@click.argument("urls", metavar="URL..", nargs=-1, required=True, type=STORE_URL)
@click.option("--listen", metavar="HOST:PORT", help="Serve /metrics until interrupted.")
@click.option(
    "--textfile", metavar="FILE", type=click.Path(), help="Write them for node_exporter's textfile collector."
)
@output_options
def command(output: Output, urls: Sequence[str], listen: str | None, textfile: str | None) -> None:
    """Show capacity, use, blocks, writers and damage of the pools at URL in the text format of Prometheus.

    Nothing is changed. Hits, misses and bytes are known to the processes that use a pool: engines show them on their
    own endpoint, and `rewarm bench --metrics` while it runs.
    """
    if listen is not None and textfile is not None:
        raise ConfigError("give --listen or --textfile, not both")
    for url in urls:
        require_pool(url)
        raw = next((name for name, location in media_of(url) if location.scheme == "block"), None)
        if raw is not None:
            raise ConfigError(f"metrics does not read raw pools ({raw}); rewarm inspect {raw} shows what one holds")
    pools = Pools([medium for url in urls for medium in media_urls(url)])
    if listen is not None:
        _serve(output, listen, pools)
    elif textfile is not None:
        write_file(textfile, text_of(pools.families))
    elif output.json:
        output.answer(pools.families(), lambda console: None)
    else:
        click.echo(text_of(pools.families), nl=False)


class Pools:
    """Inspects pools, no more often than every `FRESH_S`. Safe to use from several threads."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._lock = threading.Lock()
        self._families: list[Family] = []
        self._read_at = float("-inf")

    def families(self) -> list[Family]:
        """What all pools hold; one that cannot be read says so with `rewarm_pool_up` 0."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_S:
                self._families = pool_families({url: _inspect(url) for url in self._urls})
                self._read_at = time.monotonic()
            return self._families


def _inspect(url: str) -> Inspection | None:
    try:
        return inspect_pool(url)
    except (ConfigError, StorageError, OSError):
        return None


def _serve(output: Output, listen: str, pools: Pools) -> None:
    with serve(listen, pools.families) as url:
        output.note(f"serving {url}; end with Ctrl-C")
        try:
            with interruptible(output):
                threading.Event().wait()
        except KeyboardInterrupt:
            return
