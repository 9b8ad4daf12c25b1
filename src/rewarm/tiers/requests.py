"""Batches under way in a pool: a request is one `load` or `save`, a part is what of it goes to one drive, a slice is
what of a part was handed to the drive's store at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rewarm.store.contract import Outcome, Transfer
from rewarm.store.transfer import BatchTransfer, Counters

if TYPE_CHECKING:
    from rewarm.tiers.lane import Lane

Buffers = Sequence[Any] | npt.NDArray[Any]


class Request:
    """One batch. `unsent_bytes` is what no drive has been asked for yet; `slices` counts what drives still hold.

    `account` counts its borrowed and queued bytes; `ended` is called when its memory is released. A `copy` is a save
    of the pool's own, from one tier to another.
    """

    def __init__(
        self,
        transfer: BatchTransfer,
        account: Counters,
        keys: Sequence[bytes],
        buffers: Buffers,
        lengths: list[int],
        *,
        loading: bool,
    ) -> None:
        self.transfer = transfer
        self.account = account
        self.copy = False
        self.ended: Callable[[], None] = _nothing
        self.epoch = 0
        self.keys = keys
        self.buffers = buffers
        self.lengths = lengths
        self.loading = loading
        self.borrowed_bytes = sum(lengths)
        self.queued_bytes = 0
        self.unsent_bytes = 0
        self.slices = 0
        self.parts: list[Part] = []
        self.tried: dict[int, list[Lane]] = {}

    def over(self) -> bool:
        """True when no drive holds memory of it and none will."""
        return not self.slices and not self.unsent_bytes

    def memory(self, positions: list[int]) -> Buffers:
        """The buffers of some blocks; neighbours in an array stay an array, which a store takes at once."""
        first, last = positions[0], positions[-1]
        if last - first + 1 == len(positions):
            return self.buffers[first : last + 1]
        return [self.buffers[position] for position in positions]


class Part:
    """Blocks of a request for one drive, in key order. It is what `RestoreOrder` orders."""

    def __init__(self, request: Request, lane: Lane, positions: list[int]) -> None:
        self.request = request
        self.lane = lane
        self.positions = positions
        self.cursor = 0
        self.size_bytes = sum(request.lengths[position] for position in positions)
        self.unsent_bytes = self.size_bytes
        request.unsent_bytes += self.size_bytes
        request.parts.append(self)

    @property
    def remaining_bytes(self) -> int:
        """Bytes of the whole request that no drive has been asked for."""
        return self.request.unsent_bytes

    def take(self, limit_bytes: int, limit_blocks: int) -> tuple[list[int], int]:
        """The next blocks, at least one, up to a limit: their positions and bytes."""
        lengths, count, total = self.request.lengths, 0, 0
        for position in self.positions[self.cursor : self.cursor + limit_blocks]:
            if count and total + lengths[position] > limit_bytes:
                break
            total += lengths[position]
            count += 1
        positions = self.positions[self.cursor : self.cursor + count]
        self.cursor += count
        self._sent(total)
        return positions, total

    def drop(self) -> list[int]:
        """Take everything that is left; nobody will be asked for it."""
        positions = self.positions[self.cursor :]
        self.cursor = len(self.positions)
        self._sent(self.unsent_bytes)
        return positions

    def _sent(self, count: int) -> None:
        self.unsent_bytes -= count
        self.request.unsent_bytes -= count


class Slice:
    """Blocks that a drive's store has been asked for, or a trial (`request` is None) of a drive that had failed."""

    def __init__(self, lane: Lane, request: Request | None, positions: list[int], count: int, transfer: Transfer):
        self.lane = lane
        self.request = request
        self.positions = positions
        self.bytes = count
        self.transfer = transfer
        self.descriptor = -1
        self.answered = False
        self.failed: dict[Outcome, list[int]] = {}
        self.judged_s = 0.0

    @property
    def loading(self) -> bool:
        """True for loads and trials."""
        return self.request is None or self.request.loading


def by_outcome(positions: list[int], outcomes: list[Outcome | None]) -> dict[Outcome, list[int]]:
    """Positions of blocks by what became of them; no verdict counts as `cancelled`."""
    found: dict[Outcome, list[int]] = {}
    for position, outcome in zip(positions, outcomes, strict=True):
        found.setdefault(outcome or Outcome.CANCELLED, []).append(position)
    return found


def _nothing() -> None:
    """Nobody waits for the end of a request of a caller but its transfer."""


def private_buffer(size: int) -> npt.NDArray[np.uint8]:
    """Memory of our own for a trial, which a late completion may write to at any time."""
    return np.zeros(size, np.uint8)
