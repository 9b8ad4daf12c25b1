"""One io_uring in pure Python: numpy views of the shared rings, raw system calls, no compiler.

It promises: submission entries are stored by whole batches and handed over by the one `enter` that also waits; the
number of unsubmitted entries is read from the kernel's own head, so an interrupted call loses nothing. It does not
count what is in flight: its user keeps that below `entries`, and since the completion queue is twice as long it cannot
overflow.

Memory order. The rings are read and written with plain loads and stores. There is no kernel polling thread (SQPOLL):
the kernel reads our stores inside `io_uring_enter`, called by the thread that stored, so program order is enough.
With DEFER_TASKRUN (Linux 6.1) it also writes completions only inside that thread's own calls: the same on every
architecture. Without it another processor may write a completion while we look; loads in order, and stores not ahead of
earlier loads, are then needed, which x86-64 guarantees and arm64 does not. So elsewhere than on x86-64 a ring without
DEFER_TASKRUN is refused.
"""

from __future__ import annotations

import errno
import os
import platform

import numpy as np
import numpy.typing as npt

from rewarm.errors import StorageError
from rewarm.store.devices import kernel
from rewarm.store.devices.base import COMPLETION, Completions

SQE = np.dtype(
    [
        ("opcode", "u1"),
        ("flags", "u1"),
        ("ioprio", "<u2"),
        ("fd", "<i4"),
        ("offset", "<u8"),
        ("address", "<u8"),
        ("length", "<u4"),
        ("op_flags", "<u4"),
        ("user_data", "<u8"),
        ("buffer_index", "<u2"),
        ("personality", "<u2"),
        ("file_index", "<i4"),
        ("address3", "<u8"),
        ("pad", "<u8"),
    ]
)
"""struct io_uring_sqe, 64 bytes (Linux uapi linux/io_uring.h, as every structure and number here)."""

_CQE = np.dtype([("user_data", "<u8"), ("result", "<i4"), ("flags", "<u4")])
_PARAMS_WORDS = 30

_R_DISABLED = 1 << 6
_COOP_TASKRUN = 1 << 8
_SUBMIT_ALL = 1 << 7
_SINGLE_ISSUER = 1 << 12
_DEFER_TASKRUN = 1 << 13
_SETUPS = (_SINGLE_ISSUER | _DEFER_TASKRUN | _SUBMIT_ALL, _COOP_TASKRUN | _SUBMIT_ALL, 0)
"""Tried in turn: Linux 6.1, 5.19, older. The first two spare interrupts of the thread for each completion."""

_NEEDED = {"SINGLE_MMAP": 1 << 0, "NODROP": 1 << 1, "SUBMIT_STABLE": 1 << 2, "EXT_ARG": 1 << 8}
"""Features without which this code would be wrong; all are there since Linux 5.11."""

_OFFSET_SQES = 0x10000000
_ENTER_GETEVENTS_EXT_ARG = (1 << 0) | (1 << 3)
_REGISTER_ENABLE_RINGS = 12
_U32 = 0xFFFFFFFF


def _setup(entries: int) -> tuple[int, npt.NDArray[np.uint32], int]:
    """Create a disabled ring; returns (descriptor, struct io_uring_params as words, setup flags)."""
    number = kernel.number_of("io_uring_setup")
    for flags in _SETUPS:
        params = np.zeros(_PARAMS_WORDS, np.uint32)
        params[2] = flags | _R_DISABLED
        fd = kernel.call(number, entries, params.ctypes.data)
        if fd >= 0:
            return fd, params, flags
        if fd != -errno.EINVAL:  # EINVAL: an older kernel does not know these flags
            break
    raise StorageError(f"io_uring_setup: {kernel.describe(fd)}")


class Ring:
    """A ring, disabled until `enable` is called by the thread that will use it from then on."""

    def __init__(self, entries: int) -> None:
        self.fd, params, flags = _setup(entries)
        try:
            self._check(int(params[5]), flags)
            self._map(params)
        except StorageError:
            os.close(self.fd)
            raise
        self._enter = kernel.number_of("io_uring_enter")
        self._timespec = np.zeros(2, np.int64)
        self._argument = np.array([0, 0, self._timespec.ctypes.data], np.uint64)  # struct io_uring_getevents_arg

    @staticmethod
    def _check(features: int, flags: int) -> None:
        missing = [name for name, bit in _NEEDED.items() if not features & bit]
        if missing:
            raise StorageError(f"io_uring_setup: this kernel lacks {', '.join(missing)} (Linux 5.11 has them)")
        if not flags & _DEFER_TASKRUN and platform.machine() != "x86_64":
            raise StorageError(f"io_uring_setup: no DEFER_TASKRUN (Linux 6.1), needed on {platform.machine()}")

    def _map(self, params: npt.NDArray[np.uint32]) -> None:
        self.entries, cq_entries = int(params[0]), int(params[1])
        sq, cq = params[10:20].tolist(), params[20:30].tolist()
        length = max(sq[6] + self.entries * 4, cq[5] + cq_entries * _CQE.itemsize)
        self._rings = kernel.Mapping(self.fd, length, 0)
        try:
            self._slots = kernel.Mapping(self.fd, self.entries * SQE.itemsize, _OFFSET_SQES)
        except StorageError:
            self._rings.unmap()
            raise
        memory = self._rings.bytes()

        def words(offset: int, count: int = 1) -> npt.NDArray[np.uint32]:
            return memory[offset : offset + 4 * count].view(np.uint32)

        self._sq_head, self._sq_tail = words(sq[0]), words(sq[1])
        self._cq_head, self._cq_tail = words(cq[0]), words(cq[1])
        words(sq[6], self.entries)[:] = np.arange(self.entries, dtype=np.uint32)
        self._sqes = self._slots.bytes().view(np.uint64).reshape(self.entries, 8)
        cqes = memory[cq[5] : cq[5] + cq_entries * _CQE.itemsize].view(_CQE)
        self._cq_entries = cq_entries
        self._user_data, self._results = cqes["user_data"], cqes["result"]

    def enable(self) -> None:
        """Bind the ring to the calling thread."""
        result = kernel.call(kernel.number_of("io_uring_register"), self.fd, _REGISTER_ENABLE_RINGS)
        if result < 0:
            raise StorageError(f"io_uring_register: {kernel.describe(result)}")

    def store(self, sqes: npt.NDArray[np.void]) -> None:
        """Append entries (dtype `SQE`); there must be room. Nothing starts before `enter`."""
        rows = sqes.view(np.uint64).reshape(len(sqes), 8)
        tail = int(self._sq_tail[0])
        start = tail & (self.entries - 1)
        first = min(len(rows), self.entries - start)
        self._sqes[start : start + first] = rows[:first]
        if first < len(rows):
            self._sqes[: len(rows) - first] = rows[first:]
        self._sq_tail[0] = (tail + len(rows)) & _U32

    def unsubmitted(self) -> int:
        """Entries stored that the kernel has not taken yet."""
        return (int(self._sq_tail[0]) - int(self._sq_head[0])) & _U32

    def enter(self, minimum: int, left_s: float | None) -> int:
        """Hand over everything stored and wait for `minimum` completions or `left_s`; entries taken, or -errno."""
        address = 0
        if minimum and left_s is not None:
            self._timespec[:] = divmod(int(left_s * 1e9), 1_000_000_000)
            address = self._argument.ctypes.data
        flags = _ENTER_GETEVENTS_EXT_ARG if address else 1
        return kernel.call(
            self._enter, self.fd, self.unsubmitted(), minimum, flags, address, self._argument.nbytes if address else 0
        )

    def collect(self) -> Completions | None:
        """Take every completion that is there; None if there is none."""
        head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
        count = (tail - head) & _U32
        if not count:
            return None
        start = head & (self._cq_entries - 1)
        first = min(count, self._cq_entries - start)
        found = np.empty(count, COMPLETION)
        tags, results = found["tag"], found["result"]
        tags[:first] = self._user_data[start : start + first]
        results[:first] = self._results[start : start + first]
        if first < count:
            tags[first:] = self._user_data[: count - first]
            results[first:] = self._results[: count - first]
        self._cq_head[0] = tail
        return found

    def close(self) -> None:
        """Free the ring. What is in flight completes in the kernel, without a trace here."""
        self.abandon()
        self._slots.unmap()
        self._rings.unmap()

    def abandon(self) -> None:
        """Close the descriptor and drop the views, leaving the memory mapped (a forked child has none)."""
        os.close(self.fd)
        self.fd = -1
        del self._sq_head, self._sq_tail, self._cq_head, self._cq_tail, self._sqes, self._user_data, self._results
