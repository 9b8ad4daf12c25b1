"""The command `rewarm`: finds a verb, imports it when it is called, and turns errors into one line and an exit code.

`VERBS` is the whole list, in the order a new user meets them, with the line that help shows: help imports no verb.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import click

import rewarm
from rewarm.cli import exits
from rewarm.errors import RewarmError

VERBS = {
    "demo": "The main job on this machine's own disk: restore KV cache cold, beside recompute.",
    "probe": "The raw read and write ceiling of a medium.",
    "bench": "Measure cold recovery on one or more stores, beside recompute.",
    "compare": "Two results beside each other: faster, slower, or no difference beyond noise.",
    "plan": "Recompute, local drives or an array: nodes, capacity, writes, money.",
    "record": "Record what an engine looks up and saves, as a trace with hashed keys.",
    "trace": "What a trace asks for, and what a cache of each size would hit.",
    "geometry": "KV bytes per token, per rank and per request of a model.",
    "report": "Make one HTML page of results and plans.",
    "format": "Make a raw pool on a block device, a partition or a fixed file.",
    "inspect": "Show what a pool holds, without changing it.",
    "metrics": "What pools hold, in the format of Prometheus.",
    "check": "Verify every file and block of a pool, and repair it.",
    "evict": "Drop the oldest blocks of a pool down to a size.",
    "erase": "Remove every block of one namespace.",
    "config": "Show or check a configuration file.",
    "connect": "Print how to start an engine over a store, and try whether it would work.",
}


class Verbs(click.Group):
    """A click group whose commands are imported on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all verbs, in the order of help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a verb; None for an unknown name."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"rewarm.cli.{cmd_name}_command").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb of a command line; an unknown one is an error that names the nearest."""
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            near = difflib.get_close_matches(name, VERBS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(VERBS)}"
            raise click.UsageError(f"unknown command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; what Rewarm or the operating system raises ends in one line and an exit code."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has gone: click ends the process quietly
        except (RewarmError, OSError) as error:
            exits.show_error(exits.describe(error))
            ctx.exit(exits.exit_code(error))
        except KeyboardInterrupt:
            exits.show_error("interrupted")
            ctx.exit(exits.INTERRUPTED)


_EPILOG = """Exit codes: 0 ok, 1 findings or a missed objective, 2 wrong usage, 3 the medium failed.

Completion, for bash: eval "$(_REWARM_COMPLETE=bash_source rewarm)"; also zsh_source and fish_source.
"""


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG, no_args_is_help=True)
@click.version_option(rewarm.__version__, prog_name="rewarm", message="%(prog)s %(version)s")
def main() -> None:
    """Keep the KV cache of large language models on flash, restore it, and measure what that is worth.

    A URL is memory:, file:///dir?capacity=2TiB, block:///dev/.., or simply the path of a directory.
    """
