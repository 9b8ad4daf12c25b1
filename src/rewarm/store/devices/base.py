"""The contract of a device: batches of reads, writes and syncs in flight, driven by one thread.

A device is owned by one thread at a time: only `wake` may be called from another. `submit` hands over a whole batch
and never waits for the medium; `reap` waits for completions with the interpreter lock released. The memory named by an
operation must stay mapped until its completion is reaped: the device does not keep it alive.
A result is the number of bytes moved (0 for a sync) or a negative errno. A short result is passed on as it is:
the caller treats it as a failure.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

READ = 0
WRITE = 1
SYNC = 2
"""fdatasync of `fd`; offset, address and length are ignored."""

OPERATION = np.dtype(
    [("tag", "<u8"), ("opcode", "<u4"), ("fd", "<i4"), ("offset", "<u8"), ("address", "<u8"), ("length", "<u8")]
)
"""One operation; `tag` comes back with its completion and is the caller's (below 2**63)."""

COMPLETION = np.dtype([("tag", "<u8"), ("result", "<i8")])

Operations = npt.NDArray[np.void]
Completions = npt.NDArray[np.void]

LENGTH_MAX = 1 << 30
"""Bytes of one operation; callers split larger blocks."""


class Device(Protocol):
    """A rung of the ladder. `name` goes into `stats`; `depth` is how many operations it takes at once."""

    name: str
    depth: int

    def submit(self, operations: Operations) -> None:
        """Start operations (dtype `OPERATION`, shape (n,)); n must be at most `depth - in_flight()`.

        Operations start in order. Raises `StorageError` only when the device as a whole is unusable; an operation
        that the kernel refuses completes with a negative errno.
        """

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """Wait until `minimum` completions, a `wake` or the timeout; return all that are there (maybe none).

        With nothing in flight it waits for `wake` or the timeout.
        """

    def wake(self) -> None:
        """Make a `reap` that waits now, or the next one, return soon. Callable from any thread, also after close."""

    def in_flight(self) -> int:
        """Operations submitted and not yet reaped."""

    def close(self) -> None:
        """Free the device. With operations in flight it leaves behind what the kernel may still write to."""
