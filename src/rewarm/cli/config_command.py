"""`rewarm config show|check FILE`: what a configuration file means, and whether its drives can keep it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click
import msgspec
from rich.console import Console

from rewarm.cli import exits
from rewarm.cli.output import Output, output_options
from rewarm.cli.render import print_table
from rewarm.store.pool import POOL_FILE
from rewarm.tiers.config import Config, read_config
from rewarm.tiers.opening import PoolLocation, capacities, parse_pool_url, stack_settings
from rewarm.units import format_size, parse_size


class Concern(msgspec.Struct, frozen=True):
    """Something that will not work as written: the drive, and what to do."""

    drive: str
    what: str


@click.group()
def command() -> None:
    """Show or check a configuration file."""


@command.command()
@click.argument("file", type=click.Path(dir_okay=False))
@output_options
def show(output: Output, file: str) -> None:
    """Print every key with its value, and the URL that says the same."""
    config = read_config(file)
    parse_pool_url(config.url())
    answer = {"file": config.file, "url": config.url(), "keys": config.shown()}
    output.answer(answer, lambda console: _render(console, config))


@command.command()
@click.argument("file", type=click.Path(dir_okay=False))
@output_options
def check(output: Output, file: str) -> None:
    """Look at the drives that FILE names, and change nothing. Exit code 1 when something will not work."""
    config = read_config(file)
    location = parse_pool_url(config.url())
    concerns = _concerns(config, location)
    answer = {"file": config.file, "url": config.url(), "concerns": concerns}
    output.answer(answer, lambda console: _render_concerns(console, config, concerns))
    if concerns:
        raise click.exceptions.Exit(exits.FINDINGS)


def _render(console: Console, config: Config) -> None:
    print_table(console, config.file, config.shown())
    console.print(f"\n{config.url()}", soft_wrap=True)


def _render_concerns(console: Console, config: Config, concerns: list[Concern]) -> None:
    print_table(console, "concerns", concerns)
    if not concerns:
        console.print(f"{config.file}: nothing found")


def _concerns(config: Config, location: PoolLocation) -> list[Concern]:
    given = config.values.get("capacity")
    sizes = capacities(location, None if given is None else parse_size(given))
    if "dram" in location.options:
        stack_settings(location.options, block_tokens=1)  # raises; the engine may know the tokens of a block
    concerns: list[Concern] = []
    devices: dict[int, str] = {}
    for (name, drive), size in zip(location.media(), [*sizes, None], strict=False):
        if drive.scheme == "block":
            continue  # `capacities` has read its header.
        if drive.scheme != "file":
            concerns.append(Concern(name, "keeps its blocks in this process's memory, and loses them with it"))
            continue
        if not os.path.isdir(name):
            concerns.append(Concern(name, "is no directory: mount the drive, and make the directory"))
            continue
        if not os.access(name, os.W_OK | os.X_OK):
            concerns.append(Concern(name, "cannot be written to by this user"))
        other = devices.setdefault(os.stat(name).st_dev, name)
        if other != name:
            concerns.append(Concern(name, f"is on the same file system as {other}: together they are no faster"))
        own = drive.options.get("capacity")
        wanted = size if own is None else parse_size(own)
        total = shutil.disk_usage(name).total
        if wanted is not None and wanted > total:
            concerns.append(Concern(name, f"is to hold {format_size(wanted)}, and has {format_size(total)} in all"))
        if wanted is None and not (Path(name) / POOL_FILE).exists():
            concerns.append(Concern(name, "holds no pool yet, and nothing says how large it may grow: set capacity"))
    return concerns
