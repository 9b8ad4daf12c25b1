"""`rewarm format block:///dev/..`: make a raw pool on a block device, a partition or a fixed file.

It refuses whatever may hold something: a file system, a partition table, a raw pool, a device that is mounted or held.
"""

from __future__ import annotations

import click

from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.render import print_struct
from rewarm.errors import ConfigError
from rewarm.store.opening import parse_url
from rewarm.store.raw.formatting import format_device
from rewarm.units import parse_size


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--force", is_flag=True, help="Overwrite a file system, a partition table or a raw pool nobody owns.")
@click.option("--slot", help="Bytes of a slot, the largest block and a page; default: a 32nd of the pool, to 256MiB.")
@output_options
def command(output: Output, url: str, force: bool, slot: str | None) -> None:
    """Make a raw pool on the device that URL names (block:///dev/..). This host owns it, and saves to it.

    A mounted or held device, and a pool whose owner lives, are refused with --force too.
    """
    location = parse_url(url)
    if location.scheme != "block":
        raise ConfigError(f"{url!r} is no raw pool; format takes block:///dev/.., other pools are made when opened")
    unused = [name for name in location.options if name != "host"]
    if unused:
        raise ConfigError(f"format knows no option {unused[0]!r}; give it when the pool is opened")
    with output.progress("formatting"):
        made = format_device(
            location.path,
            force=force,
            slot_bytes=None if slot is None else parse_size(slot),
            host=location.options.get("host", ""),
        )
    output.answer(made, lambda console: print_struct(console, made))
