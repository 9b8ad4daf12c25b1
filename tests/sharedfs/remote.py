"""A process on a host of the lab that does as it is told, one line at a time: see `tests.store.neighbour`."""

from __future__ import annotations

import queue
import sys
import threading

from tests.sharedfs.hosts import Host

ANSWER_S = 90.0
"""Nothing that a store is asked here may take longer, whatever has failed."""


class Ended(AssertionError):
    """The process is not there any more."""


class Remote:
    """One such process; answers are awaited for so long, never for ever."""

    def __init__(self, host: Host, url: str) -> None:
        self.process = host.start(sys.executable, "-m", "tests.store.neighbour", url)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self.answer() == "open"

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line.strip())
        self._answers.put("")

    def begin(self, line: str) -> None:
        """Tell without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = ANSWER_S) -> str:
        """The next answer. Fails where none comes in time, and with `Ended` where the process has ended."""
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"no answer within {seconds} s") from None
        if not line:
            raise Ended
        return line

    def answered(self) -> bool:
        """True when an answer is there, or the process has ended."""
        return not self._answers.empty()

    def ask(self, line: str, seconds: float = ANSWER_S) -> str:
        """Tell, and wait for the answer."""
        self.begin(line)
        return self.answer(seconds)

    def close(self) -> None:
        """Let it close its store and end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(ANSWER_S) == 0

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()
