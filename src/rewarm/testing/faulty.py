"""A device that misbehaves on purpose: for tests of everything that stands on a device.

`FaultyDevice` wraps any device. Operations without a fault go through unchanged; a faulted one is carried out here, by
plain system calls, so that its effect is exactly what the fault says, even after the device was closed:

    device = FaultyDevice(UringDevice(), seed=7)
    device.next(stall(), opcode=READ)        # the next read hangs until release_stalled()
    device.at(3, failure(errno.ENOSPC))      # operation 3, counted from 0
    device.chance(bit_flip(), 0.01)          # one read in a hundred, by the seed

A stalled or late read has its bytes in private memory at once and writes them into the target only when it ends, as a
late DMA does; a stalled or late write takes its bytes from the caller's memory only then. Memory that was given back
too early is therefore changed, or read, and a test can see it. It does not model a medium that loses synced data.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import mmap
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.devices.base import COMPLETION, READ, SYNC, WRITE, Completions, Device, Operations
from rewarm.store.devices.threads import execute

SECTOR_BYTES = 512
"""What a medium writes whole or not at all."""


class Kind(enum.StrEnum):
    """What goes wrong; the names under which `FaultyDevice.injected` counts."""

    FAILURE = "failure"
    SHORT = "short"
    BIT_FLIP = "bit_flip"
    TORN_WRITE = "torn_write"
    STALL = "stall"
    LATE = "late"


_APPLIES = {
    Kind.FAILURE: {READ, WRITE, SYNC},
    Kind.SHORT: {READ, WRITE},
    Kind.BIT_FLIP: {READ},
    Kind.TORN_WRITE: {WRITE},
    Kind.STALL: {READ, WRITE, SYNC},
    Kind.LATE: {READ, WRITE, SYNC},
}


@dataclass(frozen=True)
class Fault:
    """One way to go wrong; made by the functions below."""

    kind: Kind
    error: int = 0
    seconds: float = 0.0


def failure(error: int = errno.EIO) -> Fault:
    """Nothing happens, and the operation completes with `error` (EIO, ENOSPC, ESTALE, ...)."""
    return Fault(Kind.FAILURE, error=error)


def short() -> Fault:
    """Only a prefix is read or written (possibly nothing), and the result says so."""
    return Fault(Kind.SHORT)


def bit_flip() -> Fault:
    """One bit of what was read is wrong; the result is that of a good read."""
    return Fault(Kind.BIT_FLIP)


def torn_write(error: int = 0) -> Fault:
    """Only a prefix of whole sectors reaches the medium; success is reported, or `error` if given."""
    return Fault(Kind.TORN_WRITE, error=error)


def stall() -> Fault:
    """The operation does not complete before `release_stalled`."""
    return Fault(Kind.STALL)


def late(seconds: float) -> Fault:
    """The operation completes, and touches memory, that many seconds later: whether or not anybody still reaps."""
    return Fault(Kind.LATE, seconds=seconds)


@dataclass(frozen=True)
class _Operation:
    tag: int
    opcode: int
    fd: int
    offset: int
    address: int
    length: int


@dataclass
class _Rule:
    """A fault that strikes operation `at`, or the next `left` operations, or each with `probability`."""

    fault: Fault
    opcode: int | None
    at: int | None = None
    left: int | None = None
    probability: float = 1.0

    def spent(self) -> bool:
        return self.left == 0

    def strikes(self, index: int, opcode: int, dice: random.Random) -> bool:
        if opcode not in _APPLIES[self.fault.kind] or self.opcode not in (None, opcode):
            return False
        if self.at not in (None, index) or dice.random() >= self.probability:
            return False
        if self.left is not None:
            self.left -= 1
        return True


class FaultyDevice:
    """A `Device` around `inner`. Rules may be added from any thread; the first that strikes an operation is used."""

    def __init__(self, inner: Device, *, seed: int = 0) -> None:
        self.name = inner.name
        self.depth = inner.depth
        self._inner = inner
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        self._submitting = threading.Lock()
        self._rules: list[_Rule] = []
        self._ready: list[tuple[int, int]] = []
        self._stalled: list[tuple[int, Callable[[], int]]] = []
        self._pending = 0
        self._seen = 0
        self._woken = False
        self._injected: Counter[Kind] = Counter()

    # Scripting.

    def next(self, fault: Fault, count: int = 1, opcode: int | None = None) -> None:
        """Strike the next `count` operations that the fault can strike (only those of `opcode`, if given)."""
        self._add(_Rule(fault, opcode, left=count))

    def at(self, index: int, fault: Fault) -> None:
        """Strike operation `index`, counted from 0 over the life of the device."""
        self._add(_Rule(fault, None, at=index, left=1))

    def chance(self, fault: Fault, probability: float, opcode: int | None = None) -> None:
        """Strike each operation with `probability`, by the seed: the same sequence of operations, the same faults."""
        if not 0.0 <= probability <= 1.0:
            raise ConfigError(f"probability must be 0 to 1, got {probability}")
        self._add(_Rule(fault, opcode, probability=probability))

    def heal(self) -> None:
        """Forget every rule; what is stalled stays so."""
        with self._lock:
            self._rules.clear()

    def release_stalled(self) -> int:
        """Let every stalled operation act and complete now; returns how many.

        After `heal` none is left: a batch that is being submitted meanwhile is waited for.
        """
        with self._submitting, self._lock:
            released, self._stalled = self._stalled, []
        for tag, act in released:
            self._finish(tag, act())
        return len(released)

    def stalled(self) -> int:
        """Operations that hang now."""
        return len(self._stalled)

    @property
    def injected(self) -> Counter[Kind]:
        """How many operations each kind has struck."""
        with self._lock:
            return self._injected.copy()

    @property
    def seen(self) -> int:
        """Operations submitted so far: the index of the next."""
        return self._seen

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    # The contract of a device.

    def submit(self, operations: Operations) -> None:
        """See `Device.submit`; beside it, a faulted operation may wait for the medium here."""
        room = self.depth - self.in_flight()
        if len(operations) > room:
            raise MisuseError(f"{len(operations)} operations submitted to the faulty device with room for {room}")
        with self._submitting:
            faults = [self._decide(int(opcode)) for opcode in operations["opcode"]]
            clean = np.array([fault is None for fault in faults], np.bool_)
            if clean.any():
                self._inner.submit(operations if clean.all() else operations[clean])
            for fields, fault in zip(operations.tolist(), faults, strict=True):
                if fault is not None:
                    self._pending += 1
                    self._inject(_Operation(*fields), fault)

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """See `Device.reap`."""
        want = min(minimum, self.in_flight() or 1)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        parts = [self._inner.reap(0)]
        while True:
            with self._lock:
                ready, self._ready = self._ready, []
                woken = self._woken
            self._pending -= len(ready)
            parts.append(np.array(ready, COMPLETION))
            missing = want - sum(len(part) for part in parts)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if missing <= 0 or woken or left == 0.0:
                with self._lock:
                    self._woken = False
                return np.concatenate(parts)
            parts.append(self._inner.reap(missing, left))

    def wake(self) -> None:
        """See `Device.wake`."""
        with self._lock:
            self._woken = True
        self._inner.wake()

    def in_flight(self) -> int:
        """Operations submitted and not yet reaped, stalled and late ones too."""
        return self._inner.in_flight() + self._pending

    def close(self) -> None:
        """Close `inner`. What is stalled or late still acts on memory when its moment comes."""
        self._inner.close()

    # The faults.

    def _decide(self, opcode: int) -> Fault | None:
        with self._lock:
            index = self._seen
            self._seen += 1
            for rule in self._rules:
                if rule.strikes(index, opcode, self._dice):
                    self._injected[rule.fault.kind] += 1
                    self._rules = [one for one in self._rules if not one.spent()]
                    return rule.fault
        return None

    def _finish(self, tag: int, result: int) -> None:
        with self._lock:
            self._ready.append((tag, result))
        self._inner.wake()

    def _inject(self, operation: _Operation, fault: Fault) -> None:
        if fault.kind in (Kind.STALL, Kind.LATE):
            self._postpone(operation, fault)
        elif fault.kind is Kind.FAILURE:
            self._finish(operation.tag, -fault.error)
        elif operation.opcode == READ:
            self._finish(operation.tag, self._spoil_read(operation, flip=fault.kind is Kind.BIT_FLIP))
        else:
            self._finish(operation.tag, self._tear(operation, fault))

    def _postpone(self, operation: _Operation, fault: Fault) -> None:
        act = _read_act(operation) if operation.opcode == READ else _write_act(operation)
        if fault.kind is Kind.STALL:
            with self._lock:
                self._stalled.append((operation.tag, act))
            return
        timer = threading.Timer(fault.seconds, lambda: self._finish(operation.tag, act()))
        timer.daemon = True
        timer.start()

    def _spoil_read(self, operation: _Operation, *, flip: bool) -> int:
        data, result = _read_privately(operation)
        if result <= 0:
            return result
        if flip:
            data[self._dice.randrange(result)] ^= 1 << self._dice.randrange(8)
        else:
            result = self._dice.randrange(result)
        ctypes.memmove(operation.address, data.ctypes.data, result)
        return result

    def _tear(self, operation: _Operation, fault: Fault) -> int:
        if fault.kind is Kind.SHORT:
            reached = self._dice.randrange(max(1, operation.length))
            result = reached
        else:
            sectors = -(-operation.length // SECTOR_BYTES)
            reached = self._dice.randrange(max(1, sectors)) * SECTOR_BYTES
            result = -fault.error if fault.error else operation.length
        # Through the page cache: a prefix need not be aligned as O_DIRECT wants it. Synced, so that nothing differs
        # from a prefix that went directly.
        try:
            fd = os.open(f"/proc/self/fd/{operation.fd}", os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            return -(error.errno or errno.EBADF)
        try:
            for one in (_Operation(0, WRITE, fd, operation.offset, operation.address, reached), _sync_of(fd)):
                _execute(one)
        finally:
            os.close(fd)
        return result


def _execute(operation: _Operation) -> int:
    fields = operation.opcode, operation.fd, operation.offset, operation.address, operation.length
    return execute((operation.tag, *fields))


def _sync_of(fd: int) -> _Operation:
    return _Operation(0, SYNC, fd, 0, 0, 0)


def _read_privately(operation: _Operation) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]:
    """Read into private, page-aligned memory (as O_DIRECT wants it); returns (memory, result)."""
    data = np.frombuffer(mmap.mmap(-1, max(1, operation.length)), np.uint8)
    address = int(data.ctypes.data)
    return data, _execute(_Operation(0, READ, operation.fd, operation.offset, address, operation.length))


def _read_act(operation: _Operation) -> Callable[[], int]:
    """Read now; the act that ends it copies into the target."""
    data, result = _read_privately(operation)

    def act() -> int:
        if result > 0:
            ctypes.memmove(operation.address, data.ctypes.data, result)
        return result

    return act


def _write_act(operation: _Operation) -> Callable[[], int]:
    """The act that writes, or syncs, when it is called, even if the caller has closed its descriptor by then."""
    try:
        fd = os.dup(operation.fd)
    except OSError as error:
        refused = -(error.errno or errno.EBADF)
        return lambda: refused

    def act() -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            return _execute(_Operation(0, operation.opcode, fd, operation.offset, operation.address, operation.length))

    return act
