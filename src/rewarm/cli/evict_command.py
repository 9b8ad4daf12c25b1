"""`rewarm evict URL --to 80%|SIZE`: drop the oldest blocks of a pool until it takes no more than that."""

from __future__ import annotations

import click
import msgspec

from rewarm.cli import exits
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import open_pool
from rewarm.cli.render import print_struct
from rewarm.errors import ConfigError
from rewarm.store.contract import Stats
from rewarm.units import format_size, parse_size


class Evicted(msgspec.Struct, frozen=True):
    """What an eviction did."""

    target_bytes: int
    freed_bytes: int
    used_bytes: int
    capacity_bytes: int


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--to", "target", required=True, help="A share of the capacity (80%) or a size (1.5TiB).")
@output_options
def command(output: Output, url: str, target: str) -> None:
    """Drop whole segments of the pool at URL, oldest first. Exit code 1 when it still takes more than asked for."""
    parse_size_or_share(target, 0)  # a slip of the pen shows before anything is opened
    with open_pool(url) as store:
        before = store.stats()
        to_bytes = parse_size_or_share(target, before.capacity_bytes)
        excess = max(before.used_bytes - to_bytes, 0)
        evicted = before.evicted_bytes
        with output.progress(
            "evicting", total=excess or None, unit="B", poll=lambda: store.stats().evicted_bytes - evicted
        ):
            freed = store.evict(to_bytes)
        result = _result(to_bytes, freed, store.stats())
    output.answer(result, lambda console: print_struct(console, result))
    if result.used_bytes > to_bytes:
        output.note(
            f"still {format_size(result.used_bytes)}: the rest is in use, pinned, or belongs to running writers"
        )
        raise click.exceptions.Exit(exits.FINDINGS)


def _result(to_bytes: int, freed: int, after: Stats) -> Evicted:
    return Evicted(to_bytes, freed, after.used_bytes, after.capacity_bytes)


def parse_size_or_share(text: str, capacity_bytes: int) -> int:
    """Bytes from "80%" of a capacity or from "1.5TiB". Raises `click.BadParameter`."""
    try:
        if not text.endswith("%"):
            return parse_size(text)
        share = float(text[:-1])
        if not 0 <= share <= 100:
            raise ConfigError(f"{text!r} is no share of a capacity; from 0% to 100%")
        return int(capacity_bytes * share / 100)
    except ValueError as error:  # ConfigError is one
        reason = error if isinstance(error, ConfigError) else f"{text!r} is no share; write for example '80%'"
        raise click.BadParameter(str(reason), param_hint="--to") from error
