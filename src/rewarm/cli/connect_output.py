"""What every `rewarm connect ENGINE` prints: the command, notes, and what was tried; exit code 1 when a part failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import click
import msgspec
from rich.console import Console

from rewarm.cli import exits
from rewarm.cli.output import Output
from rewarm.connectors.checking import Check


class Start(Protocol):
    """How to start an engine; a struct, so that `--json` gives all of it."""

    @property
    def command(self) -> str:
        """To be pasted into a shell."""

    @property
    def notes(self) -> list[str]:
        """What to know beside it."""


def answer(output: Output, title: str, found: Start, checks: Sequence[Check] | None) -> None:
    """Print how to start, and the checks, if any were asked for. Exits with 1 when one failed."""
    values = {**msgspec.to_builtins(found), "checks": checks}
    output.answer(values, lambda console: _render(console, title, found, checks or ()))
    if not all(one.ok for one in checks or ()):
        raise click.exceptions.Exit(exits.FINDINGS)


def _render(console: Console, title: str, found: Start, checks: Sequence[Check]) -> None:
    console.print(f"{title}:\n")
    console.print(found.command, soft_wrap=True, markup=False)
    for note in found.notes:
        console.print(f"\n{note}", soft_wrap=True, markup=False)
    for i, check in enumerate(checks):
        line = f"{'ok  ' if check.ok else 'FAIL'}  {check.part}: {check.what}"
        console.print(line if i else f"\n{line}", soft_wrap=True, markup=False)
