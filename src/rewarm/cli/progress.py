"""Progress on stderr: a bar with rate and time left on a terminal, a plain line now and then elsewhere.

Nothing is written for work under two seconds when stderr is no terminal. A thread does the showing, so progress goes
on while a verb waits in one long call; it reads counts only and never touches the medium.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from rewarm.errors import RewarmError
from rewarm.units import format_duration, format_rate, format_size

FIRST_LINE_S = 2.0
"""Shorter work than this prints no plain line."""
LINE_EVERY_S = 5.0
"""Plain lines come no faster than this."""
_TICK_S = 0.25
"""How often the thread looks: slow enough to cost a benchmark nothing."""


class Progress:
    """How far a piece of work is. Every method may be called from any thread."""

    def __init__(self, label: str, total: float | None, unit: str, poll: Callable[[], float] | None) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0.0
        self._poll = poll
        self._lock = threading.Lock()

    def advance(self, amount: float = 1) -> None:
        """Add finished work, in the unit of the progress."""
        with self._lock:
            self.done += amount

    def update(self, *, done: float | None = None, total: float | None = None, label: str | None = None) -> None:
        """Set what is given."""
        with self._lock:
            self.done = self.done if done is None else done
            self.total = self.total if total is None else total
            self.label = self.label if label is None else label

    def poll(self) -> None:
        """Take the count from the callable given at the start; once that fails, keep the last count."""
        if self._poll is None:
            return
        try:
            self.done = float(self._poll())
        except RewarmError:  # the store was closed under us: the work is over
            self._poll = None

    def describe(self, elapsed_s: float) -> str:
        """Counts, rate and time left as text."""
        parts = [self._count()]
        if elapsed_s > 0 and self.done > 0:
            rate = self.done / elapsed_s
            parts.append(format_rate(rate) if self.unit == "B" else f"{rate:,.0f} {self.unit}/s")
            if self.total and self.total > self.done:
                parts.append(f"{format_duration((self.total - self.done) / rate)} left")
        else:
            parts.append(f"{elapsed_s:.0f} s")
        return ", ".join(part for part in parts if part)

    def _count(self) -> str:
        shown = format_size if self.unit == "B" else _number
        if self.total:
            return f"{shown(self.done)} of {shown(self.total)}{'' if self.unit == 'B' else ' ' + self.unit}"
        return f"{shown(self.done)}{'' if self.unit == 'B' else ' ' + self.unit}" if self.done else ""


def _number(count: float) -> str:
    return f"{count:,.0f}"


@contextmanager
def show_progress(
    label: str,
    *,
    total: float | None = None,
    unit: str = "blocks",
    poll: Callable[[], float] | None = None,
    shown: bool = True,
) -> Iterator[Progress]:
    """Show a piece of work until the block ends.

    `unit` "B" makes sizes and byte rates, any other word is counted. The count comes from `advance` and `update`, or
    from `poll`, which is called four times a second from another thread.
    """
    progress = Progress(label, total, unit, poll)
    if not shown:
        yield progress
        return
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    interactive = console.is_terminal and not console.is_dumb_terminal
    ended = threading.Event()
    show = _show_bar if interactive else _show_lines
    thread = threading.Thread(target=show, args=(progress, console, ended), name="rewarm-progress", daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()


def _show_lines(progress: Progress, console: Console, ended: threading.Event) -> None:
    started = time.monotonic()
    due = started + FIRST_LINE_S
    while not ended.wait(_TICK_S):
        now = time.monotonic()
        if now >= due:
            progress.poll()
            console.print(f"{progress.label}: {progress.describe(now - started)}", markup=False)
            due = now + LINE_EVERY_S


def _show_bar(progress: Progress, console: Console, ended: threading.Event) -> None:
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
    # Stdout is left alone: the answer of a verb must not end up on stderr.
    with Bar(*columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False) as bar:
        task = bar.add_task(progress.label, total=progress.total, text="")
        while not ended.wait(_TICK_S):
            progress.poll()
            text = progress.describe(time.monotonic() - started)
            bar.update(
                task, description=progress.label, completed=progress.done, total=progress.total, text=text, refresh=True
            )
