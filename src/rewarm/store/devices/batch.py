"""What the three devices share: checks of a batch, one waiting loop, `wake`, `close`, the end of a device after fork.

A rung fills in the small methods at the end of `BatchDevice`; everything that callers rely
on, as written in `base`, is decided here once. `_woken` and `_waiting` make waking cheap: `wake` calls the kernel only
while a `reap` waits, and what it leaves behind when it comes too late breaks a later wait without being a wake.
"""

from __future__ import annotations

import abc
import os
import threading
import time
import weakref

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.devices.base import COMPLETION, LENGTH_MAX, OPERATION, SYNC, Completions, Operations

DEPTH_MAX = 16384
"""Operations in flight: io_uring takes at most 32768 entries, and each device keeps some for itself."""

CLOSE_WAIT_S = 5.0
"""How long `close` waits for a call in another thread (one that hangs in the kernel) before it leaves it behind."""

TAG_MAX = 2**63 - 1

Mask = npt.NDArray[np.bool_]

_maximum = np.maximum.reduce  # half the cost of ndarray.max on a short array


def as_rows(operations: Operations) -> npt.NDArray[np.uint64]:
    """Operations as numbers, shape (n, 5): tag, opcode + (fd << 32), offset, address, length.

    Whole columns cost a third of what fields of a structured array do, and batches are short.
    """
    return np.ascontiguousarray(operations).view(np.uint64).reshape(-1, 5)


_NOTHING = np.empty(0, COMPLETION)

_live: weakref.WeakSet[BatchDevice] = weakref.WeakSet()


def _abandon_all_in_child() -> None:
    for device in list(_live):
        device._abandon_in_child()


os.register_at_fork(after_in_child=_abandon_all_in_child)


class BatchDevice(abc.ABC):
    """Base of the rungs: the contract of `base.Device` over the methods that a rung fills in."""

    name = "batch"

    def __init__(self, depth: int) -> None:
        if not 1 <= depth <= DEPTH_MAX:
            raise ConfigError(f"depth must be 1 to {DEPTH_MAX}, got {depth}")
        self.depth = depth
        self._owner = threading.Lock()
        self._wake_lock = threading.Lock()
        self._waiting = False
        self._woken = False
        self._ended = ""
        self._in_flight = 0
        self.notes: list[str] = []
        self._open()
        _live.add(self)

    def submit(self, operations: Operations) -> None:
        """See `base.Device.submit`. Raises `MisuseError` over the depth, or on malformed operations."""
        with self._owner:
            self._check_usable()
            if len(operations):
                self._start(operations, self._check_batch(operations))
                self._in_flight += len(operations)

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """See `base.Device.reap`."""
        with self._owner:
            self._check_usable()
            want = min(minimum, self._in_flight or 1)
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            with self._wake_lock:
                self._waiting = True
            try:
                parts = self._wait(want, deadline)
            finally:
                with self._wake_lock:
                    self._waiting = self._woken = False
        if not parts:
            return _NOTHING
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def wake(self) -> None:
        """See `base.Device.wake`."""
        with self._wake_lock:
            known, self._woken = self._woken, True
            if self._waiting and not known and self._ended != _FREED:
                self._interrupt()

    def register(self, address: int, length: int) -> int:
        """See `base.Registers.register`. Raises `MisuseError` where memory overlaps what is registered."""
        with self._owner:
            self._check_usable()
            return self._register(address, length)

    def unregister(self, address: int, length: int) -> None:
        """See `base.Registers.unregister`."""
        with self._owner:
            if not self._ended:
                self._check_usable()
                self._unregister(address, length)

    def in_flight(self) -> int:
        """Operations submitted and not yet reaped."""
        return self._in_flight

    def close(self) -> None:
        """See `base.Device.close`. Idempotent, and safe while another thread waits in `reap`."""
        if self._ended:
            return
        self._ended = _CLOSED
        self.wake()
        if not self._owner.acquire(timeout=CLOSE_WAIT_S):
            return
        try:
            with self._wake_lock:
                self._ended = _FREED
                self._free()
        finally:
            self._owner.release()

    def _check_usable(self) -> None:
        if self._ended:
            raise MisuseError(f"the {self.name} device {self._ended}; open the store again")

    def _check_batch(self, operations: Operations) -> Mask | None:
        """Raise `MisuseError` unless the batch is sound; returns the mask of its syncs, None if there are none."""
        if operations.dtype != OPERATION or operations.ndim != 1:
            raise MisuseError(f"operations must be a 1-d array of OPERATION, got {operations.dtype} {operations.shape}")
        room = self.depth - self._in_flight
        if len(operations) > room:
            raise MisuseError(f"{len(operations)} operations submitted to the {self.name} device with room for {room}")
        opcodes = operations["opcode"]
        highest = _maximum(opcodes)
        if highest > SYNC:
            raise MisuseError(f"unknown opcode {highest}; READ, WRITE or SYNC")
        rows = as_rows(operations)
        tag, _, _, _, length = _maximum(rows).tolist()  # down each column
        if tag > TAG_MAX:
            raise MisuseError("tags must be below 2**63")
        syncs = None
        if highest == SYNC:
            syncs = opcodes == SYNC
            length = int(_maximum(operations["length"], where=~syncs, initial=0))
        if length > LENGTH_MAX:
            raise MisuseError(f"an operation moves at most {LENGTH_MAX} bytes; split larger ones")
        return syncs

    def _wait(self, want: int, deadline: float | None) -> list[Completions]:
        """The loop behind `reap`: collect, then let the rung wait for what is missing, until done, woken or late."""
        parts: list[Completions] = []
        got = self._gather(parts)
        looked = want > 0
        while True:
            need = 0 if self._woken else max(0, want - got)
            if need == 0 and looked and not self._unstarted():
                return parts
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._step(need, left)
            looked = True
            got += self._gather(parts)
            if deadline is not None and time.monotonic() >= deadline:
                want = 0

    def _gather(self, parts: list[Completions]) -> int:
        found = self._collect()
        if found is None or not len(found):
            return 0
        parts.append(found)
        self._in_flight -= len(found)
        return len(found)

    def _abandon_in_child(self) -> None:
        """In a forked child: threads are gone and locks may be held for ever, so start with new ones and end."""
        self._owner = threading.Lock()
        self._wake_lock = threading.Lock()
        self._in_flight = 0
        if self._ended != _FREED:
            self._drop_in_child()
        self._ended = _FORKED if not self._ended else self._ended
        self._waiting = False

    # What a rung fills in.

    @abc.abstractmethod
    def _open(self) -> None:
        """Create what the rung needs. Raises `StorageError` where the machine refuses it."""

    @abc.abstractmethod
    def _start(self, operations: Operations, syncs: Mask | None) -> None:
        """Take a checked, non-empty batch; `syncs` masks its syncs, None where there are none."""

    @abc.abstractmethod
    def _collect(self) -> Completions | None:
        """Completions that are there, without waiting."""

    @abc.abstractmethod
    def _step(self, need: int, left_s: float | None) -> None:
        """Start what is unstarted and wait for `need` completions, an interrupt or `left_s`; it may return early."""

    def _register(self, address: int, length: int) -> int:
        """Pin memory where the rung can."""
        return 0

    def _unregister(self, address: int, length: int) -> None:  # noqa: B027 not every rung pins memory
        """Undo `_register`."""

    def _unstarted(self) -> int:
        """Operations taken by `_start` that the kernel has not seen yet."""
        return 0

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """Break a `_step` that waits in another thread."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Give everything back without waiting for operations in flight."""

    def _drop_in_child(self) -> None:  # noqa: B027 not every rung has descriptors
        """Close the descriptors that a forked child inherited; touch nothing else."""


_CLOSED = "is closing"
_FREED = "is closed"
_FORKED = "belongs to the process that opened it and cannot be used after fork"
