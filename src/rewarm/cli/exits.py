"""Exit codes, and the one place where an error becomes a line on stderr. Verbs raise; they do not print errors."""

from __future__ import annotations

import errno

from rich.console import Console

from rewarm.errors import RewarmError, StorageError

OK = 0
FINDINGS = 1
"""The verb worked and has bad news: findings, or an objective that was missed."""
USAGE = 2
MEDIUM = 3
"""The medium failed: no permission, no space, an I/O error."""
INTERRUPTED = 130
"""What shells report for a process that Ctrl-C ended."""

_WRITTEN_WRONG = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
"""An operating system error with one of these is about a path that the caller wrote: usage, not the medium."""


def exit_code(error: RewarmError | OSError) -> int:
    """The exit code that an error stands for."""
    if isinstance(error, OSError):
        return USAGE if error.errno in _WRITTEN_WRONG else MEDIUM
    return MEDIUM if isinstance(error, StorageError) else USAGE


def describe(error: RewarmError | OSError) -> str:
    """One line for people: what failed and, for an error of the operating system, where."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason
    return str(error)


def show_error(message: str) -> None:
    """Write `error: ...` to stderr, coloured on a terminal only (and never with NO_COLOR set)."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]error:[/bold red]", end=" ")
    console.print(message, markup=False)
