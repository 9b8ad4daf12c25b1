"""Writes beside a cell, as an engine's own saves would load the medium: raw, at a rate, into one file of bounded size.

They do not go through the store, so they neither evict sessions nor change what its readers look up.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rewarm.errors import StorageError

WRITE_BYTES = 1 << 20
FILE_BYTES = 256 << 20
"""The file is written over and over: it takes no more room, whatever the rate."""


@dataclass
class Written:
    """What came of it; complete when the block has ended."""

    bytes_per_s: float = 0.0
    failure: OSError | None = None


@contextmanager
def writing(folder: Path | None, bytes_per_s: float) -> Iterator[Written]:
    """Write below `folder` at a rate while the block runs; nothing without a folder or a rate.

    Raises `StorageError` at the end when the medium failed a write.
    """
    written = Written()
    if folder is None or not bytes_per_s:
        yield written
        return
    ended = threading.Event()
    path = folder / "interference"
    thread = threading.Thread(target=_write, args=(path, bytes_per_s, ended, written), name="rewarm-interference")
    thread.start()
    try:
        yield written
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)
    if written.failure:
        raise StorageError(f"writing beside the restores failed: {written.failure.strerror}") from written.failure


def _write(path: Path, bytes_per_s: float, ended: threading.Event, written: Written) -> None:
    buffer = mmap.mmap(-1, WRITE_BYTES)
    buffer.write(os.urandom(WRITE_BYTES))
    start, done = time.monotonic(), 0
    try:
        descriptor = _opened(path)
        try:
            while not ended.wait(max(0.0, start + done / bytes_per_s - time.monotonic())):
                done += os.pwrite(descriptor, buffer, done % FILE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        written.failure = error
    written.bytes_per_s = done / (time.monotonic() - start)


def _opened(path: Path) -> int:
    """Past the page cache where the file system allows it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)
