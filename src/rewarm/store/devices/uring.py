"""The first rung: io_uring, driven by numpy stores and one system call for a whole batch and the wait after it.

`submit` only stores entries; the next `reap` starts them with the call that also waits. That halves the system calls,
and beside a busy Python thread each one costs up to a switch interval (5 ms) for the interpreter lock. An owner that
wants operations started without waiting calls `reap(0)`, which returns at once.

The thread that first calls `submit` or `reap` owns the device to its end: the kernel refuses others (SINGLE_ISSUER),
and they get `MisuseError`. It should close the device before it ends: what is in flight then is cancelled, or completes
unseen. `wake` is an eventfd read kept in the ring, linked to an expired timeout, because of all completions only a
timeout ends a wait for several at once. It ends only a wait that has begun: `WAIT_SLICE_S` is for the wake that comes
while the kernel is still taking the batch.
"""

from __future__ import annotations

import errno
import os
import threading
import time

import numpy as np

from rewarm.errors import MisuseError, StorageError
from rewarm.store.devices import kernel
from rewarm.store.devices.base import Completions, Operations
from rewarm.store.devices.batch import BatchDevice, Mask, as_rows
from rewarm.store.devices.buffers import Buffers
from rewarm.store.devices.ring import SQE, Ring

_OP_FSYNC = 3
_OP_TIMEOUT = 11
_OP_READ = 22
_FSYNC_DATASYNC = 1
_IO_LINK = 1 << 2

_WAKE_TAG = 1 << 63
_WAKE_END_TAG = _WAKE_TAG + 1
_WAKE_ENTRIES = 2

WAIT_SLICE_S = 0.01
"""Longest single wait for more completions than a wake makes itself: so late may such a wake be noticed. On a medium
that works, what is waited for comes earlier; on one that hangs, this costs nothing that matters."""

_FOREIGN = "the uring device belongs to the thread that used it first"

_RETRIES_MAX = 10_000
"""Times a ring out of kernel memory (EAGAIN) is tried again, 1 ms apart, before the device is given up."""


class UringDevice(BatchDevice):
    """io_uring on plain addresses; `depth` operations in flight. Raises `StorageError` where the kernel refuses."""

    name = "uring"

    def __init__(self, depth: int = 128) -> None:
        super().__init__(depth)

    def _open(self) -> None:
        self._event_fd = kernel.open_eventfd()
        try:
            self._ring = Ring(self.depth + _WAKE_ENTRIES)
        except StorageError:
            os.close(self._event_fd)
            raise
        self._counter = np.zeros(1, np.uint64)  # where the kernel reads the eventfd into
        self._at_once = np.zeros(2, np.int64)
        self._wake_entries = self._make_wake_entries()
        self._entries = np.zeros(self.depth, SQE)
        self._words = self._entries.view(np.uint64).reshape(self.depth, 8)
        self._thread: int | None = None
        self._buffers = Buffers(self._ring.fd, self.notes)
        self._armed = False
        self._retries = 0

    def _make_wake_entries(self) -> Operations:
        entries = np.zeros(_WAKE_ENTRIES, SQE)
        entries["opcode"] = _OP_READ, _OP_TIMEOUT
        entries["flags"] = _IO_LINK, 0
        entries["fd"] = self._event_fd, -1
        entries["address"] = self._counter.ctypes.data, self._at_once.ctypes.data
        entries["length"] = self._counter.nbytes, 1
        entries["user_data"] = _WAKE_TAG, _WAKE_END_TAG
        return entries

    def _check_usable(self) -> None:
        super()._check_usable()
        thread = threading.get_ident()
        if self._thread is None:
            self._ring.enable()
            self._thread = thread
        elif self._thread != thread:  # before the kernel says so, which would be after completions were taken
            raise MisuseError(_FOREIGN)

    def _start(self, operations: Operations, syncs: Mask | None) -> None:
        count = len(operations)
        rows = as_rows(operations)
        words = self._words[:count]
        words[:, 0] = rows[:, 1] + _OP_READ  # WRITE follows READ here and there, and fd is the upper half of both
        words[:, 1:4] = rows[:, 2:]  # offset, address, length; the upper half of the last are no flags
        words[:, 4] = rows[:, 0]
        entries = self._entries[:count]
        if syncs is not None:  # for fsync, offset and length would be a range, and an address is refused
            entries["opcode"][syncs] = _OP_FSYNC
            entries["op_flags"][syncs] = _FSYNC_DATASYNC
            for field in ("offset", "address", "length"):
                entries[field][syncs] = 0
        self._buffers.assign(entries, operations["opcode"], syncs)
        self._ring.store(entries)

    def _register(self, address: int, length: int) -> int:
        return self._buffers.register(address, length)

    def _unregister(self, address: int, length: int) -> None:
        self._buffers.unregister(address, length)

    def _unstarted(self) -> int:
        return self._ring.unsubmitted()

    def _collect(self) -> Completions | None:
        found = self._ring.collect()
        if found is None:
            return None
        tags = found["tag"]
        if int(np.maximum.reduce(tags)) < _WAKE_TAG:
            return found
        # The end of the pair may come later: it then breaks one wait early, which the loop in `reap` continues.
        self._armed = self._armed and not (tags == _WAKE_TAG).any()
        return found[tags < _WAKE_TAG]

    def _step(self, need: int, left_s: float | None) -> None:
        if need and not self._armed:
            self._ring.store(self._wake_entries)
            self._armed = True
        if need > _WAKE_ENTRIES:
            left_s = WAIT_SLICE_S if left_s is None else min(left_s, WAIT_SLICE_S)
        result = self._ring.enter(need, left_s)
        if result >= 0 or result in (-errno.EINTR, -errno.ETIME):
            self._retries = 0
        elif result == -errno.EEXIST:
            raise MisuseError(_FOREIGN)
        elif result == -errno.EAGAIN and self._retries < _RETRIES_MAX:
            self._retries += 1
            time.sleep(0.001)
        else:
            raise StorageError(f"io_uring_enter: {kernel.describe(result)}")

    def _interrupt(self) -> None:
        kernel.hold_eventfd_write(self._event_fd)

    def _free(self) -> None:
        self._ring.close()
        os.close(self._event_fd)

    def _drop_in_child(self) -> None:
        self._ring.abandon()
        os.close(self._event_fd)
