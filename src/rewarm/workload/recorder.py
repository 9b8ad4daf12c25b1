"""Records what a connector looks up and saves, beside an engine that must not wait: bounded, buffered, on a thread.

`lookup` and `save` cost the caller one append to a queue. Above `QUEUE_MAX` events nothing is queued any more: they are
dropped and counted. A thread hashes the keys, with a secret of the recording, and writes the file, whole lines at a
time: an engine that is killed, as vLLM kills its core at the end, leaves what was written until then. A file that is
there already is never overwritten: the recording gets the next free number in its name. What cannot be written ends
the recording and is kept in `failure`; it never raises in the engine.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from rewarm.errors import StorageError
from rewarm.workload.formats.recording import TraceWriter

log = logging.getLogger("rewarm.workload")

QUEUE_MAX = 10_000
"""Events that wait for the thread: some seconds of a very busy engine, and at 1,000 keys each half a gigabyte."""
BATCH_MAX = 100
"""Events that are written together: each write may cost the thread a switch of the interpreter."""
NAMES_MAX = 10_000

Event = tuple[float, Sequence[bytes], int]
"""Seconds since the start, keys, and the prompt's tokens; -1: a save."""


class Recorder:
    """See the module. Opens the file at once; raises `StorageError` when that fails."""

    def __init__(self, path: Path, block_tokens: int) -> None:
        self.path, self._stream = _create(path)
        self.dropped = 0
        """Events that were not recorded, because the thread did not keep up or the file could not be written."""
        self.failure: str | None = None
        self._lines = io.BytesIO()
        self._writer = TraceWriter(self._lines, block_tokens)
        self._start_s = time.monotonic()
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="rewarm-record", daemon=True)
        self._thread.start()

    def lookup(self, keys: Sequence[bytes], tokens: int) -> None:
        """A request asks for these blocks, in prefix order; its prompt has `tokens`."""
        self._put((time.monotonic() - self._start_s, keys, tokens))

    def save(self, keys: Sequence[bytes]) -> None:
        """The engine gives these blocks away."""
        self._put((time.monotonic() - self._start_s, keys, -1))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _put(self, event: Event) -> None:
        if self.failure is not None or self._queue.qsize() >= QUEUE_MAX:
            if not self.dropped:
                log.warning("rewarm: the recording %s lacks events from now on", self.path)
            self.dropped += 1
            return
        self._queue.put(event)

    def _write_all(self) -> None:
        try:
            with self._stream:
                self._write_out()
                more = True
                while more:
                    more = self._take()
                    self._write_out()
        except OSError as error:  # a full disk must not end the engine
            self.failure = f"{self.path}: {error.strerror}"

    def _take(self) -> bool:
        """Wait for an event, and take what else is there; False at the end."""
        for _ in range(BATCH_MAX):
            event = self._queue.get()
            if event is None:
                return False
            at_s, keys, tokens = event
            if tokens < 0:
                self._writer.save(at_s, keys)
            else:
                self._writer.lookup(at_s, keys, tokens)
            if self._queue.empty():
                break
        return True

    def _write_out(self) -> None:
        """Write the lines so far, in as few writes as the file takes."""
        left = self._lines.getvalue()
        self._lines.seek(0)
        self._lines.truncate()
        while left:
            left = left[self._stream.write(left) :]


def _create(path: Path) -> tuple[Path, io.FileIO]:
    """A new file with this name, or with the first number in it that is free."""
    for number in range(1, NAMES_MAX):
        fresh = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            return fresh, open(fresh, "xb", buffering=0, opener=_private)
        except FileExistsError:
            continue
        except OSError as error:
            raise StorageError(f"cannot record to {path}: {error.strerror}") from error
    raise StorageError(f"cannot record to {path}: {NAMES_MAX - 1} recordings have this name already")


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CLOEXEC, 0o600)
