"""Load requests inside the read loop: a job is one `load`, a window is some of its blocks with their requests."""

from __future__ import annotations

import enum
import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rewarm.store.buffers import Borrowed
from rewarm.store.contract import Outcome
from rewarm.store.index import Places
from rewarm.store.operations import OperationPlan
from rewarm.store.transfer import BatchTransfer

WINDOW_BLOCKS = 4096
WINDOW_BYTES = 256 << 20
"""Blocks planned at a time: planning is spread over many, and one request cannot take all bounce memory."""


class Failure(enum.Enum):
    """Why a copy could not be read; the value is what a load says when there is no other."""

    GONE = (1, Outcome.MISSING)
    """The file is not there."""
    SHORT = (2, Outcome.CORRUPT)
    """The file ends before the block does."""
    MISMATCH = (3, Outcome.CORRUPT)
    """Other bytes than were saved."""
    UNREADABLE = (4, Outcome.LOST_MEDIUM)
    """The medium has lost this place."""
    MEDIUM = (5, Outcome.LOST_MEDIUM)
    """The medium does not serve now; nothing is said about the copy."""

    @property
    def outcome(self) -> Outcome:
        """The cause of the miss."""
        return self.value[1]


_GONE = (errno.ENOENT, errno.ESTALE)
_UNREADABLE = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN)
"""What file systems and drives say of a bad place."""


def failure_of(result: int) -> Failure:
    """What a request's result means that is not its length: a negative errno, or a short read."""
    if result >= 0:
        return Failure.SHORT
    if -result in _GONE:
        return Failure.GONE
    return Failure.UNREADABLE if -result in _UNREADABLE else Failure.MEDIUM


class LoadJob:
    """One `load` under way. Arrays have shape (blocks of the transfer,); `wanted` are the positions to read."""

    def __init__(
        self,
        transfer: BatchTransfer,
        keys: Sequence[bytes],
        borrowed: Borrowed,
        places: Places,
        wanted: npt.NDArray[np.int64],
    ) -> None:
        self.transfer = transfer
        self.keys = keys
        self.borrowed = borrowed
        self.slot, self.offset, self.checksum = places.segment, places.offset, places.checksum
        self.attempts = bytearray(len(keys))
        self.order = wanted[np.lexsort((self.offset[wanted], self.slot[wanted]))]
        self.cursor = 0
        self.again: list[int] = []
        self.windows = 0
        self.queued = True
        self.released = False

    def planned(self) -> bool:
        """True when every block was planned."""
        return self.cursor >= len(self.order) and not self.again

    def exhausted(self) -> bool:
        """True when nothing is left to plan."""
        return self.transfer.done() or self.planned()

    def take(self, segments_max: int) -> tuple[npt.NDArray[np.int64], bool]:
        """Next blocks to plan, and whether they may be merged: those that failed once are read alone."""
        if self.again:
            blocks = self._of_few_segments(np.array(self.again[:WINDOW_BLOCKS], np.int64), segments_max)
            del self.again[: len(blocks)]
            return blocks, False
        blocks = self.order[self.cursor : self.cursor + WINDOW_BLOCKS]
        fits = np.searchsorted(np.cumsum(self.borrowed.lengths[blocks]), WINDOW_BYTES, "right")
        blocks = self._of_few_segments(blocks[: max(int(fits), 1)], segments_max)
        self.cursor += len(blocks)
        return blocks, True

    def _of_few_segments(self, blocks: npt.NDArray[np.int64], segments_max: int) -> npt.NDArray[np.int64]:
        slots = self.slot[blocks]
        changes = np.flatnonzero(slots[1:] != slots[:-1])
        return blocks if len(changes) < segments_max else blocks[: changes[segments_max - 1] + 1]

    def give_back(self, blocks: npt.NDArray[np.int64], merge: bool) -> None:
        """Undo the end of a `take`."""
        if merge:
            self.cursor -= len(blocks)
        else:
            self.again[:0] = blocks.tolist()


class Window:
    """Some blocks of a job and their requests; block numbers inside are positions in `blocks`.

    `in_place` says that some are read straight into the caller's memory, `undivided` that each block is in one request.
    """

    def __init__(
        self,
        number: int,
        job: LoadJob,
        blocks: npt.NDArray[np.int64],
        regions: dict[int, npt.NDArray[np.uint8]],
    ) -> None:
        self.number = number
        self.job = job
        self.blocks = blocks.tolist()
        self.regions = regions
        self.in_place = len(regions) < len(blocks)
        self.paths: list[Path] = []
        self.plan: OperationPlan
        self.operations: npt.NDArray[np.void]
        self.remaining: list[int] = []
        self.undivided = False
        self.failed: dict[int, Failure | None] = {}
        self.sent = 0
        self.in_flight = 0
        self.submitted_s = 0.0
        self.expired = False

    def over(self) -> bool:
        """True when nothing of it is in the kernel or will go there."""
        return not self.in_flight and (self.sent == len(self.operations) or self.job.transfer.done())
