"""The contract of a device: batches of reads, writes and syncs in flight, driven by one thread.

The thread that first calls `submit` or `reap` owns the device to its end (constructing it binds nothing); only `wake`
may be called from another, and `close`. `submit` hands over a whole batch and never waits for the medium; `reap` waits
for completions with the interpreter lock released. The memory named by an operation must stay mapped until its
completion is reaped: the device does not keep it alive.
A result is the number of bytes moved (0 for a sync) or a negative errno. A short result is passed on as it is:
the caller treats it as a failure. After `fork` a device raises `MisuseError` in the child.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

READ = 0
WRITE = 1
SYNC = 2
"""fdatasync of `fd`; offset, address and length are ignored. It covers writes whose completion was reaped before."""

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

        Operations start in order, at the latest at the next `reap`: the wait starts them, in one system call. Call
        `reap(0)` where nothing will be waited for soon. An operation that the kernel refuses completes with a negative
        errno. Raises `MisuseError` on a malformed batch, `StorageError` only when the device as a whole is unusable.
        """

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """Wait until `minimum` completions, a `wake` or the timeout; return all that are there (maybe none).

        `minimum` counts down to what is in flight; with nothing in flight it waits for `wake` or the timeout. 0 starts
        and looks without waiting.
        """

    def wake(self) -> None:
        """Make a `reap` that waits now, or the next one, return soon. Callable from any thread, also after close."""

    def in_flight(self) -> int:
        """Operations submitted and not yet reaped."""

    def close(self) -> None:
        """Free the device, never waiting for the medium. Idempotent; a `reap` that waits in another thread ends.

        Operations not yet started are dropped. Those in flight run on in the kernel and may still write to their
        memory, which must stay mapped: nobody is told when they end.
        """


@runtime_checkable
class Registers(Protocol):
    """What a device may offer beside the contract: memory pinned once instead of for each operation. Owner only."""

    notes: list[str]
    """Lines for people about what the kernel refused after the device was opened."""

    def register(self, address: int, length: int) -> int:
        """Pin memory that many operations will use; returns the bytes pinned (0: this rung gains nothing from it).

        Operations outside it, or across its edges, work as before. Raises `MisuseError` where it overlaps what is
        pinned already.
        """

    def unregister(self, address: int, length: int) -> None:
        """Undo `register` for everything inside this memory; must come before it is unmapped."""
