"""What `bench`, `probe` and `demo` share: how progress reaches the screen, and how an interruption ends a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from rewarm.cli.output import Output
from rewarm.cli.progress import Progress

_IGNORED_MAX = 2
"""Interruptions after the first that are ignored while the run cleans up; one more gives up cleaning."""


def stages_of(output: Output, unit: str = "B") -> Callable[[str, float], AbstractContextManager[Progress]]:
    """Stages of a run as progress, in bytes or in what `unit` names."""
    return lambda label, total: output.progress(label, total=total, unit=unit)


@contextmanager
def interruptible(output: Output) -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal end the block once, in order; the next ones do not stop its cleaning.

    Raises `KeyboardInterrupt` in the block.
    """
    seen = 0

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen == 1 or seen > 1 + _IGNORED_MAX:
            raise KeyboardInterrupt
        if not output.quiet:
            os.write(2, b"cleaning up; go on interrupting to leave files behind\n")  # a handler must not use buffers

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means: go on
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
