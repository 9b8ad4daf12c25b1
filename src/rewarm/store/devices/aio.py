"""The second rung: Linux AIO, for machines that filter io_uring (containers often do). The same trick: control blocks
built by numpy stores, one `io_submit` for a batch, one `io_getevents` for the wait.

`submit` starts operations at once. It is asynchronous for O_DIRECT only: on the page cache each operation is carried
out inside `submit`, and so is a sync on a file system that has no asynchronous one. There is no memory shared with the
kernel, so memory order is the kernel's affair. `wake` submits as many polls of a readable eventfd as a waiting `reap`
wants events: they complete at once, and are dropped.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import numpy as np

from rewarm.errors import StorageError
from rewarm.store.devices import kernel
from rewarm.store.devices.base import COMPLETION, SYNC, Completions, Operations
from rewarm.store.devices.batch import BatchDevice, Mask
from rewarm.store.devices.threads import execute

_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<i4"),
        ("address", "<u8"),
        ("length", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("result_fd", "<u4"),
    ]
)
"""struct iocb of a little-endian machine (Linux uapi linux/aio_abi.h, as every structure and number here)."""

_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_OPCODES = np.array([0, 1, 3], np.uint16)
"""IOCB_CMD_PREAD, PWRITE, FDSYNC; indexed by READ, WRITE, SYNC."""

_CMD_POLL = 5
_POLLIN = 1
_WAKE_TAG = 1 << 63


class AioDevice(BatchDevice):
    """io_submit on plain addresses; `depth` operations in flight. Raises `StorageError` where the kernel refuses."""

    name = "aio"

    def __init__(self, depth: int = 128) -> None:
        super().__init__(depth)

    def _open(self) -> None:
        self._submit_number = kernel.number_of("io_submit")
        self._getevents_number = kernel.number_of("io_getevents")
        self._context = _setup(2 * self.depth)  # as many polls as operations
        try:
            self._readable_fd = kernel.open_eventfd(1)
        except StorageError:
            _destroy(self._context)
            raise
        self._blocks = np.zeros(self.depth, _IOCB)
        self._pointers = self._blocks.ctypes.data + self._blocks.itemsize * np.arange(self.depth, dtype=np.uint64)
        self._wake_block = np.zeros(1, _IOCB)
        self._wake_block[0] = (_WAKE_TAG, 0, 0, _CMD_POLL, 0, self._readable_fd, _POLLIN, 0, 0, 0, 0, 0)
        self._wake_pointers = np.full(self.depth, self._wake_block.ctypes.data, np.uint64)
        self._events = np.zeros(2 * self.depth, _EVENT)
        self._timespec = np.zeros(2, np.int64)
        self._need = 0
        self._refused: list[tuple[int, int]] = []
        self._found: list[Completions] = []

    def _start(self, operations: Operations, syncs: Mask | None) -> None:
        blocks = self._blocks[: len(operations)]
        blocks["data"] = operations["tag"]
        blocks["opcode"] = _OPCODES[operations["opcode"]]
        blocks["fd"] = operations["fd"]
        blocks["address"] = operations["address"]
        blocks["length"] = operations["length"]
        blocks["offset"] = operations["offset"]
        if syncs is not None:
            for field in ("address", "length", "offset"):
                blocks[field][syncs] = 0
        started, count = 0, len(operations)
        while started < count:
            address = self._pointers.ctypes.data + 8 * started
            result = kernel.call(self._submit_number, self._context, count - started, address)
            if result > 0:
                started += result
            elif result != -errno.EINTR:
                self._refuse(operations[started], result)
                started += 1

    def _refuse(self, operation: np.void, result: int) -> None:
        """The kernel did not take this operation: complete it here, a sync by carrying it out."""
        tag, opcode, fd = int(operation["tag"]), int(operation["opcode"]), int(operation["fd"])
        if opcode == SYNC and result == -errno.EINVAL:
            result = execute((tag, opcode, fd, 0, 0, 0))
        self._refused.append((tag, result))

    def _collect(self) -> Completions | None:
        """What earlier calls found: the kernel is asked by `_step` alone, in the call that also waits."""
        if self._refused:
            self._found.append(np.array(self._refused, COMPLETION))
            self._refused = []
        found, self._found = self._found, []
        return np.concatenate(found) if found else None

    def _step(self, need: int, left_s: float | None) -> None:
        with self._wake_lock:  # a wake before this line posts no polls, one after it posts as many as needed
            self._need = need = 0 if self._woken else need
        address = 0
        if left_s is not None:
            self._timespec[:] = divmod(int(left_s * 1e9), 1_000_000_000)
            address = self._timespec.ctypes.data
        count = kernel.call(
            self._getevents_number, self._context, need, len(self._events), self._events.ctypes.data, address
        )
        self._need = 0
        if count == -errno.EINTR:
            return
        if count < 0:
            raise StorageError(f"io_getevents: {kernel.describe(count)}")
        events = self._events[:count]
        events = events[events["data"] != _WAKE_TAG]
        found = np.empty(len(events), COMPLETION)
        found["tag"], found["result"] = events["data"], events["result"]
        self._found.append(found)

    def _interrupt(self) -> None:
        posted = 0
        while posted < self._need:
            address = self._wake_pointers.ctypes.data
            result = kernel.call(self._submit_number, self._context, self._need - posted, address)
            if result <= 0 and result != -errno.EINTR:
                return
            posted += max(0, result)

    def _free(self) -> None:
        if not self._in_flight:
            self._destroy()
            return
        # io_destroy waits for what is in flight: not here.
        threading.Thread(target=self._destroy, name="rewarm-aio-destroy", daemon=True).start()

    def _destroy(self) -> None:
        _destroy(self._context)
        os.close(self._readable_fd)

    def _drop_in_child(self) -> None:
        os.close(self._readable_fd)  # the context itself is not inherited


def _setup(events: int) -> int:
    context = ctypes.c_ulong(0)
    result = kernel.call(kernel.number_of("io_setup"), events, ctypes.addressof(context))
    if result < 0:
        hint = "; raise the sysctl fs.aio-max-nr" if result == -errno.EAGAIN else ""
        raise StorageError(f"io_setup: {kernel.describe(result)}{hint}")
    return context.value


def _destroy(context: int) -> None:
    kernel.call(kernel.number_of("io_destroy"), context)
