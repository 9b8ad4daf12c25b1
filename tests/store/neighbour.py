"""Another process on a pool that does as it is told, one line at a time: `python -m tests.store.neighbour URL`.

Started by `Neighbour`, so that a test decides the order in which processes do what.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType

from rewarm.errors import StorageError
from rewarm.store.contract import Outcome, Store
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

WAIT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


def outcomes_of(store: Store, verb: str, tag: str, count: int, size: int, seconds: float = WAIT_S) -> Counter[str]:
    """Save or load `count` blocks, waiting so long; a wrong byte counts as 'WRONG'."""
    keys = make_keys(count, tag)
    if verb == "save":
        transfer = store.save(keys, [payload(key, size) for key in keys])
        transfer.wait(seconds)
        return Counter(str(outcome) for outcome in transfer.outcomes)
    buffers = [bytearray(size) for _ in keys]
    transfer = store.load(keys, buffers)
    transfer.wait(seconds)
    found = Counter(str(outcome) for outcome in transfer.outcomes)
    for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
        found["WRONG"] += outcome is Outcome.HIT and buffer != payload(key, size)
    return +found


def obey(store: Store, line: str) -> object:
    """Do one thing; returns what to print."""
    verb, *rest = line.split()
    if verb in ("save", "load"):
        tag, count, size, *seconds = rest
        found = outcomes_of(store, verb, tag, int(count), int(size), *map(float, seconds))
        return " ".join(f"{name}={number}" for name, number in sorted(found.items()))
    try:
        return look_after(store, verb, rest)
    except StorageError as error:
        return f"StorageError: {error}"


def look_after(store: Store, verb: str, rest: list[str]) -> object:
    """The verbs that may say that the medium failed; returns what to print."""
    if verb == "held":
        tag, count = rest
        return int(store.lookup(make_keys(int(count), tag)).mask.sum())
    if verb == "evict":
        return store.evict(int(rest[0])) > 0
    if verb == "erase":
        return store.erase() > 0
    if verb == "check":
        return store.check().clean
    assert verb == "refresh"
    return store.refresh()


def main() -> None:
    """Obey until the input ends."""
    with open_store(sys.argv[1], namespace="neighbours") as store:
        sys.stdout.write("open\n")
        sys.stdout.flush()
        for line in sys.stdin:
            sys.stdout.write(f"{obey(store, line)}\n")
            sys.stdout.flush()


class Neighbour:
    """One such process."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "tests.store.neighbour", url]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, line: str) -> None:
        """Tell without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the neighbour ended with {self.process.wait()}"
        return line.strip()

    def ask(self, line: str) -> str:
        """Tell, and wait for the answer."""
        self.begin(line)
        return self.answer()

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Let it close its store and end."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait(WAIT_S) == 0

    def __enter__(self) -> Neighbour:
        assert self.answer() == "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


if __name__ == "__main__":
    main()
