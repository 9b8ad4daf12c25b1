"""How verbs answer: JSON or text on stdout, notes and progress on stderr. Verbs use nothing else to print.

@click.command()
@click.argument("url")
@output_options
def command(output: Output, url: str) -> None:
    with output.progress("checking", total=count, unit="B") as progress:
        progress.advance(4096)
    output.answer(result, lambda console: console.print(table_of(result)))
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import PurePath
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console

from rewarm.cli.progress import Progress, show_progress
from rewarm.errors import ConfigError

_PIPE_COLUMNS = 200
"""Width of tables when stdout is no terminal: wide enough that a line of ours is never cut."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Output:
    """What the caller asked for with `--json` and `--quiet`."""

    json: bool = False
    quiet: bool = False

    def answer(self, value: Any, render: Callable[[Console], None]) -> None:
        """Print the result of a verb: `value` as JSON with `--json`, else what `render` prints."""
        if self.json:
            click.echo(to_json(value))
            return
        render(text_console())

    def note(self, text: str) -> None:
        """Tell something beside the answer, on stderr; `--quiet` leaves it out."""
        if not self.quiet:
            Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(text)

    def progress(
        self,
        label: str,
        *,
        total: float | None = None,
        unit: str = "blocks",
        poll: Callable[[], float] | None = None,
    ) -> AbstractContextManager[Progress]:
        """Show that work goes on, see `rewarm.cli.progress.show_progress`; `--quiet` shows nothing."""
        return show_progress(label, total=total, unit=unit, poll=poll, shown=not self.quiet)


def output_options(function: F) -> F:
    """Give a verb the options `--json` and `--quiet`; it gets an `Output` as its first argument, `output`."""

    @click.option("--json", "json_", is_flag=True, help="Print the result as JSON on stdout.")
    @click.option("--quiet", "-q", is_flag=True, help="No progress and no notes; the result and errors remain.")
    @functools.wraps(function)
    def wrapped(*args: Any, json_: bool, quiet: bool, **kwargs: Any) -> Any:
        return function(Output(json=json_, quiet=quiet), *args, **kwargs)

    return wrapped  # type: ignore[return-value]  # click's decorators keep the callable, mypy cannot see it


def text_console() -> Console:
    """A console on stdout; wide when it is no terminal, so that pipes get whole lines. Brackets are plain text."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(highlight=False, markup=False, width=width)


def to_json(value: Any) -> str:
    """Indented JSON of structs, dataclasses and plain values; numbers and arrays of numpy become plain ones."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2).decode()


def _plain(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy for every answer
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def write_file(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a result file, whole or not at all.

    A missing directory is a `ConfigError`; anything else that fails is an `OSError` that names the file.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise ConfigError(f"cannot write {os.fspath(path)}: there is no directory {folder}; make it first")
    raw = data.encode() if isinstance(data, str) else data
    replaces = not os.path.exists(target) or os.path.isfile(target)  # a pipe or /dev/null is written to as it is
    partial = f"{target}.partial-{os.getpid()}" if replaces else target
    try:
        with open(partial, "wb") as file:
            file.write(raw)
        if replaces:
            os.replace(partial, target)
    except OSError as error:
        if replaces and os.path.exists(partial):
            os.unlink(partial)
        raise OSError(error.errno, f"cannot write: {error.strerror}", os.fspath(path)) from error
