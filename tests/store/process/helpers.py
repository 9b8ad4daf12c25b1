"""Stores that read through an I/O process: a real one, or its code in a thread of the test, which is as quick as it is
honest about everything but the interpreter lock and the death of a process."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from rewarm.store.contract import Store
from rewarm.store.file import FileStore
from rewarm.store.opening import open_store
from rewarm.store.process import engine, wire
from rewarm.store.process.arena import shared_arena
from rewarm.store.process.child import Child, Terms
from rewarm.testing import make_keys, payload

SIZE = 65536
WAIT_S = 60.0


class ChildThread:
    """Has the methods of `subprocess.Popen` that are used."""

    def __init__(self, terms: Terms, channel: socket.socket, tables: int) -> None:
        self.pid = os.getpid()
        self.channel = channel.dup()
        mapping = mmap.mmap(tables, wire.TABLES_BYTES)
        full = msgspec.structs.replace(terms, parent=self.pid)
        self.child = Child(self.channel, mapping, full)
        self._thread = threading.Thread(target=self._run, name="io-process-of-a-test", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.child.serve()
        finally:
            self.channel.close()
            self.child._tables = self.child._tables[:0].copy()  # a process ends with its memory
            del self.child

    def poll(self) -> int | None:
        """Its return code."""
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        """End it; a thread does not die in the middle, so this is an orderly end."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)


def in_a_thread(monkeypatch: pytest.MonkeyPatch) -> list[ChildThread]:
    """From now on I/O processes are threads; the list has them."""
    made: list[ChildThread] = []

    def spawn(terms: Terms, channel: socket.socket, tables: int) -> ChildThread:
        made.append(ChildThread(terms, channel, tables))
        return made[-1]

    monkeypatch.setattr(engine, "spawn", spawn)
    return made


def arena_of(blocks: int, size: int = SIZE) -> npt.NDArray[np.uint8]:
    """Shared memory, shape (blocks, size)."""
    return np.frombuffer(shared_arena(blocks * size), np.uint8).reshape(blocks, size)


def open_with_process(root: Path, options: str = "", **arguments: Any) -> FileStore:
    """A store that wants an I/O process."""
    store = open_store(f"file://{root}?capacity=256MiB&io=process{options}", **arguments)
    assert isinstance(store, FileStore)
    return store


def saved(store: Store, count: int, size: int = SIZE, tag: str = "") -> list[bytes]:
    """Keys of blocks that were saved."""
    keys = make_keys(count, tag) if tag else make_keys(count)
    assert all(store.save(keys, [payload(key, size) for key in keys]).wait(WAIT_S))
    return keys


def check_rows(rows: npt.NDArray[np.uint8], keys: list[bytes]) -> None:
    """Every row holds the payload of its key."""
    for row, key in zip(rows, keys, strict=True):
        assert bytes(row) == payload(key, len(row))


def process_of(store: FileStore) -> engine.IoProcess:
    """The I/O process of a store."""
    process = store._restorer._process
    assert process is not None
    return process


def eventually(what: Any, timeout_s: float = WAIT_S) -> None:
    """Wait until `what()` is true."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, "it did not come true"
        threading.Event().wait(0.01)


@contextlib.contextmanager
def ready(root: Path, blocks: int = 64, options: str = "", **arguments: Any) -> Iterator[tuple[FileStore, Any]]:
    """A store and the shared arena that is registered with it."""
    with open_with_process(root, options, **arguments) as store:
        arena = arena_of(blocks)
        store.register(arena)
        yield store, arena
