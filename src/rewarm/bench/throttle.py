"""An emulated medium: real reads whose completions are handed over no faster than a given rate.

`RateLimit` is a token bucket without a burst: the medium serves one byte after another at `bytes_per_s` and saves
nothing up while idle. Every read goes to the real device at once; its completion is given to the caller when both the
kernel is done and the emulated medium would be. Nothing sleeps in place of I/O, and a real medium slower than the rate
stays as slow as it is. Writes and syncs pass untouched: only restores are emulated.
"""

from __future__ import annotations

import fcntl
import heapq
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from rewarm.errors import ConfigError
from rewarm.store.devices.base import COMPLETION, READ, Completions, Device, Operations
from rewarm.units import format_rate

_STATE = struct.Struct("d")
"""When the medium is free again, on the monotonic clock, which all processes of a machine share."""


def make_shared() -> int:
    """A descriptor for `RateLimit` objects of several processes; the caller hands it on and closes it."""
    descriptor = os.memfd_create("rewarm-rate")
    os.pwrite(descriptor, _STATE.pack(-math.inf), 0)
    return descriptor


class RateLimit:
    """One emulated medium, shared by every device that reads it. Thread-safe.

    With `shared`, the descriptor of `make_shared`, it is one with those of other processes.
    """

    def __init__(
        self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic, shared: int | None = None
    ) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"an emulated rate must be above 0 bytes/s, got {bytes_per_s}")
        self.bytes_per_s = bytes_per_s
        self.clock = clock
        self._shared = shared
        self._free_at = -math.inf
        self._ended = False
        self._lock = threading.Lock()

    def serve(self, lengths: list[int]) -> list[float]:
        """Queue reads of these lengths now; return when the emulated medium is done with each, in clock seconds."""
        done = []
        with self._lock, self._exclusive():
            at = max(self._free_at, self.clock())
            for length in lengths:
                at += length / self.bytes_per_s
                done.append(at)
            self._free_at = at
        return done

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the state that processes share, if they do."""
        if self._shared is None:
            yield
            return
        fcntl.lockf(self._shared, fcntl.LOCK_EX)
        try:
            (self._free_at,) = _STATE.unpack(os.pread(self._shared, _STATE.size, 0))
            yield
            os.pwrite(self._shared, _STATE.pack(self._free_at), 0)
        finally:
            fcntl.lockf(self._shared, fcntl.LOCK_UN)

    def end(self) -> None:
        """Hold nothing back any more: a store that closes must not wait for a slow medium that is only emulated."""
        with self._lock:
            self._ended = True

    def served(self, due: float) -> bool:
        """Whether the emulated medium is done with a read that is due then."""
        return self._ended or due <= self.clock()

    def wrap(self, device: Device) -> Device:
        """The device as this medium sees it; the argument to hand to a store as `device_wrapper`."""
        return ThrottledDevice(device, self)


class ThrottledDevice:
    """A device whose reads take the time of the emulated medium; keeps the contract of `Device`."""

    def __init__(self, inner: Device, limit: RateLimit) -> None:
        self._inner = inner
        self._limit = limit
        self._due: dict[int, float] = {}
        self._held: list[tuple[float, int, int]] = []
        self.name = f"{inner.name}, emulated at {format_rate(limit.bytes_per_s)}"
        self.depth = inner.depth

    def submit(self, operations: Operations) -> None:
        """Start operations, see `base.Device`; the emulated medium begins to serve its reads now."""
        reads = operations[operations["opcode"] == READ]
        done = self._limit.serve(reads["length"].tolist())
        self._due.update(zip(reads["tag"].tolist(), done, strict=True))
        self._inner.submit(operations)

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """Wait as `base.Device` says, for operations that the kernel and the emulated medium are both done with."""
        deadline = math.inf if timeout_s is None else self._limit.clock() + timeout_s
        ready = self._served()
        while not ready or len(ready) < minimum:
            got = self._inner.reap(min(minimum, 1), self._patience(deadline) if minimum else 0.0)
            for tag, result in got.tolist():
                heapq.heappush(self._held, (self._due.pop(tag, -math.inf), tag, result))
            ready += self._served()
            # Nothing came: the time is up or somebody called `wake`, and either way the caller looks at what is there.
            if not len(got) or not minimum or self._limit.clock() >= deadline:
                break
        return np.array(ready, dtype=COMPLETION)

    def wake(self) -> None:
        """See `base.Device`."""
        self._inner.wake()

    def in_flight(self) -> int:
        """Operations submitted and not yet handed over."""
        return self._inner.in_flight() + len(self._held)

    def close(self) -> None:
        """Free the device below."""
        self._inner.close()

    def _served(self) -> list[tuple[int, int]]:
        """Take the held completions that the emulated medium is done with: (tag, result)."""
        served = []
        while self._held and self._limit.served(self._held[0][0]):
            _, tag, result = heapq.heappop(self._held)
            served.append((tag, result))
        return served

    def _patience(self, deadline: float) -> float | None:
        """Seconds until the next held completion is due or the deadline; None: until something comes."""
        until = min(deadline, self._held[0][0]) if self._held else deadline
        return None if until == math.inf else max(0.0, until - self._limit.clock())
