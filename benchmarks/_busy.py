"""The load beside which restores are measured: one Python thread that computes and never waits.

An engine's scheduler is such a thread. Beside a reader that is a process itself, the same load is a process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time


class Quiet:
    """No load."""

    def cpu_s(self) -> float:
        """CPU seconds of this process that are the load's."""
        return 0.0

    def stop(self) -> None:
        """End it."""


class BusyThread(Quiet):
    """A thread of this process."""

    def __init__(self) -> None:
        self._on = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        time.sleep(0.02)

    def _run(self) -> None:
        count = 0
        while self._on:
            count += 1

    def cpu_s(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        self._on = False
        self._thread.join()


class BusyProcess(Quiet):
    """A process; its CPU seconds are counted here only once it has ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-Sc", "while True: pass"])
        time.sleep(0.05)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
