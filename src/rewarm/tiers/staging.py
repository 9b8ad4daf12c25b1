"""Restores of any size through a bounded region: the store reads into the region, the caller copies out of it.

It promises that bytes in flight never exceed the region, however many requests run at once and however large they are,
and that a late completion meets the region only, never memory of the caller. While one piece of a request is delivered
the next is read, if the region has room. No request holds memory while it waits for more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.tiers.dram import Region, Ticket

PIECE_SHARE = 2
"""A piece is at most this part of the region, so that one can be read while another is delivered."""

Deliver = Callable[[list[int], npt.NDArray[np.uint8]], None]
"""Takes positions of hits among the keys, and their blocks, shape (positions, block_bytes): copies them on."""


class Staging:
    """See the module. One may serve any number of threads."""

    def __init__(self, region: Region, store: Store) -> None:
        self._region = region
        self._store = store
        self._piece_blocks = max(region.blocks // PIECE_SHARE, 1)
        region.register(store)

    def restore(self, keys: Sequence[bytes], deliver: Deliver, timeout: float | None = None) -> list[Outcome]:
        """Load blocks of the region's block size and deliver the hits, piece by piece; one outcome per key.

        Runs in the caller's thread, `deliver` too. After `timeout` seconds the rest is `timed_out`.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        outcomes = [Outcome.TIMED_OUT] * len(keys)
        pieces = [
            _Piece(self._region, keys[first : first + self._piece_blocks], first)
            for first in range(0, len(keys), self._piece_blocks)
        ]
        try:
            for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
                if _left(deadline_s) == 0 or not piece.begin(self._store, _left(deadline_s)):
                    break
                piece.wait(_left(deadline_s), outcomes)
                if following is not None and _left(deadline_s) != 0:
                    following.begin(self._store, 0)
                piece.deliver(deliver)
                piece.end(_left(deadline_s))
        finally:
            for piece in pieces:
                piece.end(0)
        return outcomes


class _Piece:
    """Some keys of a request, their blocks of the region, and the transfer that fills them."""

    def __init__(self, region: Region, keys: Sequence[bytes], first: int) -> None:
        self._region = region
        self._keys = keys
        self._first = first
        self._ticket: Ticket | None = None
        self._transfer: Transfer | None = None
        self._good: list[int] = []

    def begin(self, store: Store, timeout: float | None) -> bool:
        """Start to read once the region gives its blocks, seconds; False if it does not. Harmless when begun."""
        if self._transfer is not None:
            return True
        ticket = self._region.ask(len(self._keys))
        if not ticket.wait(timeout):
            ticket.release()
            return False
        assert ticket.rows is not None
        self._ticket = ticket  # first: what raises from here on must not keep the blocks
        self._transfer = store.load(self._keys, [self._region.memory[row] for row in ticket.rows.tolist()])
        return True

    def wait(self, timeout: float | None, outcomes: list[Outcome]) -> None:
        """Wait for verdicts and write them down."""
        assert self._transfer is not None
        good = self._transfer.wait(timeout)
        self._good = [number for number, hit in enumerate(good) if hit]
        for number, outcome in enumerate(self._transfer.outcomes):
            outcomes[self._first + number] = outcome or Outcome.TIMED_OUT

    def deliver(self, deliver: Deliver) -> None:
        """Hand over the hits."""
        if self._good:
            assert self._ticket is not None
            assert self._ticket.rows is not None
            rows = self._ticket.rows[self._good]
            deliver([self._first + number for number in self._good], self._region.memory[rows])

    def end(self, timeout: float | None) -> None:
        """Give the blocks back: within `timeout` seconds, or whenever the store lets go of them. Idempotent."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        if self._transfer is None:
            ticket.release()
            return
        if not self._transfer.done():
            self._transfer.cancel()
        self._transfer.wait_released(timeout)
        ticket.release_after(self._transfer)


def _left(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
