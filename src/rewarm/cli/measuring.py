"""What `bench`, `probe` and `demo` share: how progress reaches the screen, and how an interruption ends a run."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from rewarm.cli.output import Output
from rewarm.cli.progress import Progress

_AGAIN_S = 0.01
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
    seen, first = 0, signal.SIGINT

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal seen, first
        seen += 1
        first = first if seen > 1 else signal.Signals(number)
        if seen == 1 or seen > 1 + _IGNORED_MAX:
            raise KeyboardInterrupt
        if not output.quiet:
            os.write(2, b"cleaning up; go on interrupting to leave files behind\n")  # a handler must not use buffers

    def swallowed(lost: sys.UnraisableHookArgs) -> None:
        """An interruption that hit a finaliser is dropped by the interpreter: let it come again, outside of it."""
        nonlocal seen
        if not isinstance(lost.exc_value, KeyboardInterrupt):
            hook(lost)
        else:
            seen = 0
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), first)).start()

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup means: go on
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    hook, sys.unraisablehook = sys.unraisablehook, swallowed
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
