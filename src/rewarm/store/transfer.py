"""Transfers: verdicts that the caller waits for, the release of its memory, and the counters both feed.

A verdict is given once: whoever settles a block first (the I/O loop, a timeout, a cancellation) decides. The release
comes from the I/O loop alone, after the last request of the transfer has left the kernel.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rewarm.store.contract import GOOD_OUTCOMES, MISS_CAUSES, REFUSAL_CAUSES, Outcome

OUTCOMES = tuple(Outcome)
CODE = {outcome: code for code, outcome in enumerate(OUTCOMES)}
PENDING = 255
_GOOD = tuple(code < len(OUTCOMES) and OUTCOMES[code] in GOOD_OUTCOMES for code in range(256))


class Counters:
    """What a handle did since it was opened; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._load = np.zeros(len(OUTCOMES), np.int64)
        self._save = np.zeros(len(OUTCOMES), np.int64)
        self.bytes_read = 0
        self.bytes_written = 0
        self.bytes_padding = 0
        self.bytes_log = 0
        self.borrowed_bytes = 0
        self.queued_bytes = 0
        self.evicted_segments = 0
        self.evicted_bytes = 0

    def outcomes(self, codes: npt.NDArray[np.uint8], *, loading: bool) -> None:
        """Count verdicts."""
        counts = np.bincount(codes, minlength=len(OUTCOMES))
        with self._lock:
            if loading:
                self._load += counts
            else:
                self._save += counts

    def add(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def reserve(self, amount: int, limit: int) -> bool:
        """Take `amount` bytes of the save queue's budget unless that would exceed `limit`."""
        with self._lock:
            if self.queued_bytes + amount > limit:
                return False
            self.queued_bytes += amount
            return True

    @property
    def hits(self) -> int:
        """Blocks loaded and verified."""
        return int(self._load[CODE[Outcome.HIT]])

    def saved(self, outcome: Outcome) -> int:
        """Blocks of saves with this outcome."""
        return int(self._save[CODE[outcome]])

    def misses(self) -> dict[str, int]:
        """Blocks of loads that were no hit, by cause."""
        return {str(cause): int(self._load[CODE[cause]]) for cause in MISS_CAUSES}

    def refused(self) -> dict[str, int]:
        """Blocks of saves that were not stored, by cause."""
        return {str(cause): int(self._save[CODE[cause]]) for cause in REFUSAL_CAUSES}


class BatchTransfer:
    """The `Transfer` of every store in this package."""

    def __init__(self, count: int, counters: Counters, *, loading: bool, wake: Callable[[], None] = lambda: None):
        self._codes = np.full(count, PENDING, np.uint8)
        self._pending = count
        self._counters = counters
        self._loading = loading
        self._wake = wake
        self._condition = threading.Condition()
        self._released = False
        self._first_verdict_at: float | None = None
        self._eventfd = -1

    @property
    def outcomes(self) -> list[Outcome | None]:
        """One outcome per key, in key order; None where there is no verdict yet."""
        return [None if code == PENDING else OUTCOMES[code] for code in self._codes.tolist()]

    @property
    def first_verdict_at(self) -> float | None:
        """`time.monotonic()` when the first block got its verdict; None before that."""
        return self._first_verdict_at

    def first_verdict_by(self, at_s: float) -> None:
        """Somebody else gave the first verdict at this monotonic time; 0 says nothing. For the I/O loops."""
        with self._condition:
            if at_s and self._first_verdict_at is None:
                self._first_verdict_at = at_s

    def done(self) -> bool:
        """True when every block has a verdict."""
        return self._pending == 0

    def released(self) -> bool:
        """True when the buffers belong to the caller again."""
        return self._released

    def wait(self, timeout: float | None = None) -> list[bool]:
        """Wait for verdicts, seconds; what has none at the timeout becomes `timed_out`. True per key: hit or saved."""
        with self._condition:
            in_time = self._condition.wait_for(self.done, timeout)
        if not in_time:
            self._give_up(Outcome.TIMED_OUT)
        return list(map(_GOOD.__getitem__, self._codes.tobytes()))  # numpy would give the interpreter lock up

    def wait_released(self, timeout: float | None = None) -> bool:
        """Wait for the release, seconds; returns `released()`."""
        with self._condition:
            return self._condition.wait_for(self.released, timeout)

    def cancel(self) -> None:
        """Give every block without a verdict the verdict `cancelled`; what is not in the kernel yet is dropped."""
        self._give_up(Outcome.CANCELLED)

    def fileno(self) -> int:
        """An eventfd that becomes readable when every block has a verdict; closed with the transfer."""
        with self._condition:
            if self._eventfd < 0:
                self._eventfd = os.eventfd(1 if self.done() else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._eventfd

    def settle(
        self, blocks: Sequence[int] | npt.NDArray[np.int64], outcome: Outcome, *, releasing: bool = False
    ) -> None:
        """Give a verdict to blocks that have none yet. For the I/O loops.

        With `releasing` these are the last, and the memory is the caller's again with their verdicts.
        """
        where = np.asarray(blocks, np.int64)
        with self._condition:
            where = where[self._codes[where] == PENDING]
            if releasing:
                self._released = True
                self._condition.notify_all()
            if len(where):
                self._codes[where] = CODE[outcome]
                self._verdicts_given(self._codes[where])

    def release(self) -> None:
        """Give the memory back: nothing of this transfer is in the kernel. Blocks without a verdict are cancelled."""
        self._give_up(Outcome.CANCELLED)
        with self._condition:
            self._released = True
            self._condition.notify_all()

    def pending(self) -> npt.NDArray[np.int64]:
        """Positions of the blocks without a verdict."""
        with self._condition:
            return np.flatnonzero(self._codes == PENDING)

    def _give_up(self, outcome: Outcome) -> None:
        with self._condition:
            if not self._pending:
                return
            where = self._codes == PENDING
            self._codes[where] = CODE[outcome]
            self._verdicts_given(self._codes[where])
        self._wake()

    def _verdicts_given(self, codes: npt.NDArray[np.uint8]) -> None:
        if self._first_verdict_at is None:
            self._first_verdict_at = time.monotonic()
        self._counters.outcomes(codes, loading=self._loading)
        self._pending -= len(codes)
        if self._pending == 0:
            if self._eventfd >= 0:
                os.eventfd_write(self._eventfd, 1)
            self._condition.notify_all()

    def __del__(self) -> None:
        if getattr(self, "_eventfd", -1) >= 0:
            os.close(self._eventfd)


def settled_transfer(count: int, outcome: Outcome, counters: Counters, *, loading: bool) -> BatchTransfer:
    """A transfer that is over before it began: every block has `outcome` and the memory is the caller's."""
    transfer = BatchTransfer(count, counters, loading=loading)
    transfer.settle(np.arange(count), outcome)
    transfer.release()
    return transfer
