"""A load that the I/O process has: its rows in the shared table, and what verdicts mean for the caller's transfer."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rewarm.store.buffers import Held, address_of
from rewarm.store.contract import Outcome
from rewarm.store.index import Places
from rewarm.store.process.wire import STEP_ROWS, Table
from rewarm.store.transfer import CODE, OUTCOMES, PENDING, BatchTransfer

_FINAL = {CODE[Outcome.HIT], CODE[Outcome.TIMED_OUT]}
"""Verdicts of the process that stand; everything else is read again by the engine's thread."""


class Span(NamedTuple):
    """Memory here, from `start` to `end`, that the process has `shift` bytes further on."""

    start: int
    end: int
    shift: int


def remote_addresses(spans: list[Span], held: Held, sizes: Sequence[int]) -> list[int] | None:
    """Where the process has these buffers; None where some of them lie outside every span. Spans are in order."""
    if isinstance(held, np.ndarray):
        start, step = address_of(held), held.strides[0]
        here = [start + step * number for number in range(len(held))]
    else:
        here = [address_of(np.frombuffer(view, np.uint8)) for view in held]
    lowest, end = min(here), max(map(operator.add, here, sizes))
    for span in spans:
        if span.start <= lowest and end <= span.end:
            return [address + span.shift for address in here]
    there = []
    for address, size in zip(here, sizes, strict=True):
        number = bisect_right(spans, address, key=lambda span: span.start) - 1
        if number < 0 or address + size > spans[number].end:
            return None
        there.append(address + spans[number].shift)
    return there


class RemoteLoad:
    """One load that the process has: what it was asked for, and which of its blocks each row of the table is."""

    def __init__(self, number: int, transfer: BatchTransfer, keys: list[bytes], held: Held, table: Table) -> None:
        self.number = number
        self.transfer = transfer
        self.keys = keys
        self.held = held
        self.table = table
        self.bytes = 0
        self.blocks: list[int] = []
        self.sent = 0
        self.sealed = False
        self.cancelled = False
        table.first_verdict_s[0] = 0.0

    def add(self, blocks: list[int], places: Places, which: npt.NDArray[np.bool_], addresses: list[int]) -> None:
        """Rows for the blocks of `which`, at most `STEP_ROWS`; `blocks` and `addresses` are theirs."""
        start, end = len(self.blocks), len(self.blocks) + len(blocks)
        table = self.table
        table.segment[start:end] = places.segment[which]
        table.offset[start:end] = places.offset[which]
        table.length[start:end] = places.length[which]
        table.address[start:end] = addresses
        every = zip(places.checksum, which.tolist(), strict=True)
        table.checksum[start:end] = np.frombuffer(b"".join(one for one, wanted in every if wanted), "V16")
        table.code[start:end] = PENDING
        self.blocks += blocks

    def settle(self) -> list[int]:
        """Pass on verdicts that stand; returns the other blocks."""
        rest: list[int] = []
        self.transfer.first_verdict_by(float(self.table.first_verdict_s[0]))
        for start in range(0, len(self.blocks), STEP_ROWS):
            codes = self.table.code[start : min(start + STEP_ROWS, len(self.blocks))].copy()
            blocks = self.blocks[start : start + STEP_ROWS]
            for code in set(codes.tolist()):
                some = blocks if (codes == code).all() else [blocks[i] for i in np.flatnonzero(codes == code).tolist()]
                if code in _FINAL:
                    self.transfer.settle(some, OUTCOMES[code])
                else:
                    rest += some
        return rest

    def unread_segments(self) -> set[int]:
        """Segments of which something may still be on its way."""
        found: set[int] = set()
        for start in range(0, len(self.blocks), STEP_ROWS):
            part = slice(start, min(start + STEP_ROWS, len(self.blocks)))
            found.update(self.table.segment[part][self.table.code[part] == PENDING].tolist())
        return found
