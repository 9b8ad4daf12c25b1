"""Records every change that a store makes to a directory, in order, and what was synced when.

`Recorder` stands between the store and the kernel in both places where bytes go through: a device wrapper for payloads
and their syncs, and the functions of `os` for logs, headers, names and directories. The store runs on real files and
notices nothing. A moment of the recording (`losses.py`) is then a power loss: what was not synced may be gone.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rewarm.store.devices.base import SYNC, WRITE, Completions, Device, Operations

NEVER = 1 << 62


@dataclass
class Change:
    """Something that began at one tick of the recorder's clock and was over at another."""

    issued: int
    done: int = NEVER


@dataclass
class Write(Change):
    """Bytes written to a file at an offset."""

    offset: int = 0
    data: bytes = b""


@dataclass
class NameChange(Change):
    """A name that came to stand for an inode (0: a directory), or was removed (None)."""

    inode: int | None = None


@dataclass
class Trace:
    """Everything that happened below one directory; paths are relative to it."""

    writes: dict[int, list[Write]] = field(default_factory=dict)
    syncs: dict[int, list[Change]] = field(default_factory=dict)
    names: dict[str, list[NameChange]] = field(default_factory=dict)
    directory_syncs: dict[str, list[Change]] = field(default_factory=dict)
    clock: int = 0


class Recorder:
    """Records what happens below `root` while `recording()`; safe from any thread."""

    def __init__(self, root: Path) -> None:
        self.trace = Trace()
        self._root = str(root)
        self._lock = threading.Lock()
        self._inodes: dict[tuple[int, int], int] = {}
        self._real = {name: getattr(os, name) for name in ("open", "mkdir", "link", "unlink", "rmdir", "pwritev")}
        self._real |= {name: getattr(os, name) for name in ("write", "fsync", "fdatasync")}

    def tick(self) -> int:
        """The next moment."""
        with self._lock:
            self.trace.clock += 1
            return self.trace.clock

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Stand in the way of `os`."""
        patches: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "mkdir": self._mkdir,
            "link": self._link,
            "unlink": self._remover("unlink"),
            "rmdir": self._remover("rmdir"),
            "pwritev": self._pwritev,
            "write": self._write,
            "fsync": self._syncer("fsync"),
            "fdatasync": self._syncer("fdatasync"),
        }
        with ExitStack() as stack:
            for name, function in patches.items():
                stack.enter_context(mock.patch.object(os, name, function))
            yield

    def wrap(self, device: Device) -> RecordingDevice:
        """Stand in the way of a device."""
        return RecordingDevice(device, self)

    # What the device and `os` are told.

    def inode_of(self, descriptor: int) -> int | None:
        """The recorder's own number of an open file; None for one that is not of the recording."""
        facts = os.fstat(descriptor)
        return self._inodes.get((facts.st_dev, facts.st_ino))

    def write_begins(self, descriptor: int, offset: int, data: bytes) -> Write:
        """From now on some of this may be on the medium."""
        change = Write(self.tick(), offset=offset, data=data)
        inode = self.inode_of(descriptor)
        if inode is not None:
            self.trace.writes[inode].append(change)
        return change

    def sync_begins(self, descriptor: int) -> Change:
        """A sync of a file or a directory."""
        change = Change(self.tick())
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            path = self._inside(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path is not None:
                self.trace.directory_syncs.setdefault(path, []).append(change)
        elif (inode := self.inode_of(descriptor)) is not None:
            self.trace.syncs[inode].append(change)
        return change

    def _inside(self, path: Any) -> str | None:
        text = os.path.abspath(os.fspath(path))
        return os.path.relpath(text, self._root) if text == self._root or text.startswith(self._root + "/") else None

    def _name(self, path: Any, inode: int | None, act: Callable[[], Any]) -> Any:
        inside = self._inside(path)
        change = NameChange(self.tick(), inode=inode)
        result = act()
        change.done = self.tick()
        if inside is not None:
            self.trace.names.setdefault(inside, []).append(change)
        return result

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        issued = self.tick()
        descriptor: int = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        inside = self._inside(path) if flags & os.O_CREAT else None
        if inside is not None:
            facts = os.fstat(descriptor)
            inode = self.tick()
            self._inodes[(facts.st_dev, facts.st_ino)] = inode
            self.trace.writes[inode], self.trace.syncs[inode] = [], []
            self.trace.names.setdefault(inside, []).append(NameChange(issued, self.tick(), inode))
        return descriptor

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._name(path, 0, lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def _link(self, source: Any, target: Any) -> None:
        facts = os.stat(source)
        inode = self._inodes.get((facts.st_dev, facts.st_ino))
        self._name(target, inode, lambda: self._real["link"](source, target))

    def _remover(self, name: str) -> Callable[..., None]:
        def remove(path: Any, *, dir_fd: int | None = None) -> None:
            self._name(path, None, lambda: self._real[name](path, dir_fd=dir_fd))

        return remove

    def _pwritev(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        change = self.write_begins(descriptor, offset, b"".join(buffers))
        written: int = self._real["pwritev"](descriptor, buffers, offset, flags)
        change.done = self.tick()
        return written

    def _write(self, descriptor: int, data: Any) -> int:
        change = self.write_begins(descriptor, 0, bytes(data))  # the store writes so only what it writes at once
        written: int = self._real["write"](descriptor, data)
        change.done = self.tick()
        return written

    def _syncer(self, name: str) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            change = self.sync_begins(descriptor)
            self._real[name](descriptor)
            change.done = self.tick()

        return sync


class RecordingDevice:
    """A device whose writes and syncs are recorded: begun when submitted, over when reaped."""

    def __init__(self, inner: Device, recorder: Recorder) -> None:
        self.name, self.depth = inner.name, inner.depth
        self._inner = inner
        self._recorder = recorder
        self._changes: dict[int, Change] = {}

    def submit(self, operations: Operations) -> None:
        """See `Device.submit`."""
        for tag, opcode, descriptor, offset, address, length in operations.tolist():
            if opcode == WRITE:
                data = ctypes.string_at(address, length)
                self._changes[tag] = self._recorder.write_begins(descriptor, offset, data)
            elif opcode == SYNC:
                self._changes[tag] = self._recorder.sync_begins(descriptor)
        self._inner.submit(operations)

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """See `Device.reap`."""
        found = self._inner.reap(minimum, timeout_s)
        for tag, result in found.tolist():
            change = self._changes.pop(tag, None)
            if change is not None and result >= 0:
                change.done = self._recorder.tick()
        return np.asarray(found)

    def wake(self) -> None:
        """See `Device.wake`."""
        self._inner.wake()

    def in_flight(self) -> int:
        """See `Device.in_flight`."""
        return self._inner.in_flight()

    def close(self) -> None:
        """See `Device.close`."""
        self._inner.close()
