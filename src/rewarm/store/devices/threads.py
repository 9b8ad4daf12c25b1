"""The last rung: plain pread, pwrite and fdatasync in daemon threads. Works for every descriptor and file system.

It is the fastest rung where the kernel copies (page cache, tmpfs, NFS, FUSE). A worker takes several operations at a
time while the queue is long and reports them together, because one hand-over per operation is what makes executors
slow. Operations start in order and complete in any. `close` does not wait for operations that run: their threads are
left behind, finish what they do in memory that must stay mapped, and end.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import deque

import numpy as np

from rewarm.errors import StorageError
from rewarm.store.devices.base import COMPLETION, READ, SYNC, Completions, Operations
from rewarm.store.devices.batch import BatchDevice, Mask

WORKERS = 16

_libc = ctypes.CDLL(None, use_errno=True)
_pread = _libc.pread64 if hasattr(_libc, "pread64") else _libc.pread
_pwrite = _libc.pwrite64 if hasattr(_libc, "pwrite64") else _libc.pwrite
for _function in (_pread, _pwrite):
    _function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
    _function.restype = ctypes.c_ssize_t
_fdatasync = _libc.fdatasync
_fdatasync.argtypes = [ctypes.c_int]

_Operation = tuple[int, int, int, int, int, int]  # the fields of OPERATION, in order


class ThreadsDevice(BatchDevice):
    """`workers` daemon threads, started as the load needs them; `depth` operations queued or running."""

    name = "threads"

    def __init__(self, depth: int = 128, workers: int = WORKERS) -> None:
        self._workers = min(workers, depth)
        super().__init__(depth)

    def _open(self) -> None:
        self._started = 0
        self._shared = _Shared(self._workers)

    def _start(self, operations: Operations, syncs: Mask | None) -> None:
        self._start_workers(min(self._workers, self._in_flight + len(operations)))
        with self._shared.lock:
            self._shared.queue.extend(operations.tolist())
            self._shared.work.notify(len(operations))

    def _start_workers(self, wanted: int) -> None:
        while self._started < wanted:
            worker = threading.Thread(target=self._shared.run, name=f"rewarm-io-{self._started}", daemon=True)
            try:
                worker.start()
            except RuntimeError as error:  # the limit on threads: fewer are slower, none is a dead device
                if self._started == 0:
                    raise StorageError(f"threads: {error}") from error
                return
            self._started += 1

    def _collect(self) -> Completions | None:
        shared = self._shared
        with shared.lock:
            done, shared.done = shared.done, []
        return np.array(done, COMPLETION) if done else None

    def _step(self, need: int, left_s: float | None) -> None:
        shared = self._shared
        if need == 0:
            return
        with shared.lock:
            shared.need = need
            try:
                shared.ready.wait_for(lambda: len(shared.done) >= need or self._woken, left_s)
            finally:
                shared.need = 0

    def _interrupt(self) -> None:
        with self._shared.lock:
            self._shared.ready.notify_all()

    def _free(self) -> None:
        with self._shared.lock:
            self._shared.closed = True
            self._shared.queue.clear()
            self._shared.work.notify_all()


class _Shared:
    """What the workers hold on to: not the device, so that one forgotten by its owner is not kept alive by them."""

    def __init__(self, workers: int) -> None:
        self.lock = threading.Lock()
        self.work = threading.Condition(self.lock)
        self.ready = threading.Condition(self.lock)
        self.queue: deque[_Operation] = deque()
        self.done: list[tuple[int, int]] = []
        self.need = 0
        self.closed = False
        self._workers = workers

    def run(self) -> None:
        """The life of a worker."""
        while taken := self._take():
            finished = [(operation[0], execute(operation)) for operation in taken]
            with self.lock:
                self.done += finished
                if self.need and len(self.done) >= self.need:
                    self.ready.notify()

    def _take(self) -> list[_Operation]:
        with self.lock:
            while not self.queue:
                if self.closed:
                    return []
                self.work.wait()
            # Half of a fair share: a slow operation holds up few others, and the rest is taken by whoever is free.
            count = max(1, len(self.queue) // (2 * self._workers))
            return [self.queue.popleft() for _ in range(count)]


def execute(operation: _Operation) -> int:
    """Carry one operation out; returns bytes moved or a negative errno."""
    _, opcode, fd, offset, address, length = operation
    if opcode == SYNC:
        while (result := _fdatasync(fd)) < 0 and ctypes.get_errno() == errno.EINTR:
            pass
        return 0 if result == 0 else -ctypes.get_errno()
    move = _pread if opcode == READ else _pwrite
    moved = 0
    while True:
        count: int = move(fd, address + moved, length - moved, offset + moved)
        if count < 0 and ctypes.get_errno() == errno.EINTR:
            continue
        if count <= 0:  # the end of the file, or an error: what was moved before it is a short result
            return moved or (-ctypes.get_errno() if count < 0 else 0)
        moved += count
        if moved >= length:
            return moved
