"""A bounded region of memory that restores go through: one mapping, cut into blocks, given out in order of asking.

It promises that what is given out never exceeds the region, that asking never fails and nobody waits for ever: a ticket
is all or nothing, is never enlarged, and the first to ask is the first to be served, so no two can wait for each other.
A request larger than the region passes through it in pieces (`rewarm.tiers.staging`). It keeps nothing for later: a
block is gone when its ticket is released.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections import deque
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.contract import Store, Transfer
from rewarm.store.process.arena import shared_arena
from rewarm.units import format_size

Rows = npt.NDArray[np.int64]

LATE_S = 0.05
"""Between two looks at memory that a store still holds after its request was given up."""


class RegionStats(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a region: all, given out now, given out at most so far; and who waits."""

    region_bytes: int
    block_bytes: int
    used_bytes: int
    used_bytes_max: int
    waiting: int
    huge_pages: bool


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What must be in flight against what fits; `advice` is one sentence with the number to set, or empty."""

    needed_bytes: int
    region_bytes: int
    requests_at_once: float
    advice: str


def fit_of(request_bytes: int, concurrency: int, region_bytes: int) -> Fit:
    """Whether `concurrency` requests of `request_bytes` fit into `region_bytes` at once."""
    needed, advice = request_bytes * concurrency, ""
    if needed > region_bytes:
        advice = (
            f"{concurrency} requests of {format_size(request_bytes)} are {format_size(needed)} in flight, and the "
            f"region holds {format_size(region_bytes)}: restores wait for each other; set {needed} bytes or more"
        )
    return Fit(
        needed_bytes=needed,
        region_bytes=region_bytes,
        requests_at_once=region_bytes / request_bytes,
        advice=advice,
    )


class Ticket:
    """Blocks of a region that were asked for; `rows` are their numbers once they are given. Release it when done."""

    def __init__(self, region: Region, blocks: int) -> None:
        self.blocks = blocks
        self.rows: Rows | None = None
        self._region = region
        self._released = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the blocks are given, seconds; False at the timeout or after `release`."""
        return self._region._wait(self, timeout)

    def release_after(self, transfer: Transfer) -> None:
        """Give the blocks back when a transfer has released their memory: now, or whenever the medium lets go."""
        self._region._release_after(self, transfer)

    def release(self) -> None:
        """Give the blocks back, or stop waiting for them. Nothing may use their memory any more. Idempotent."""
        self._region._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class Region:
    """Memory of `region_bytes`, rounded down to whole blocks. Any thread may ask and release.

    `memory` has shape (blocks, block_bytes); `shared` memory is what stores with `io=process` read into directly.
    Raises `ConfigError` when not one block fits.
    """

    def __init__(self, region_bytes: int, block_bytes: int, *, shared: bool = False) -> None:
        if block_bytes < 1 or region_bytes < block_bytes:
            raise ConfigError(
                f"a region of {region_bytes} bytes holds no block of {block_bytes} bytes; set at least {block_bytes}"
            )
        self.block_bytes = block_bytes
        self.blocks = region_bytes // block_bytes
        size = self.blocks * block_bytes
        mapping, self.huge_pages = (shared_arena(size), False) if shared else map_memory(size)
        self.memory = np.frombuffer(mapping, np.uint8).reshape(self.blocks, block_bytes)
        self._free = list(range(self.blocks - 1, -1, -1))
        self._waiting: deque[Ticket] = deque()
        self._late: list[tuple[Transfer, Ticket]] = []
        self._changed = threading.Condition(threading.RLock())
        self._used_max = 0

    def register(self, *stores: Store) -> int:
        """Announce the memory to stores; returns the bytes that all of them have registered."""
        return min((store.register(self.memory) for store in stores), default=0)

    def ask(self, blocks: int) -> Ticket:
        """Queue for so many blocks, at most the whole region; never fails and never waits.

        Raises `MisuseError` for more than the region: pass through it in pieces.
        """
        if not 1 <= blocks <= self.blocks:
            raise MisuseError(f"a ticket is for 1 to {self.blocks} blocks of this region, got {blocks}")
        ticket = Ticket(self, blocks)
        with self._changed:
            self._waiting.append(ticket)
            self._serve()
        return ticket

    def fit(self, request_bytes: int, concurrency: int) -> Fit:
        """Whether `concurrency` requests of `request_bytes` fit at once. If not they queue, and nothing fails."""
        return fit_of(request_bytes, concurrency, self.memory.nbytes)

    def stats(self) -> RegionStats:
        """Figures of this moment."""
        with self._changed:
            self._take_late()
            return RegionStats(
                region_bytes=self.memory.nbytes,
                block_bytes=self.block_bytes,
                used_bytes=(self.blocks - len(self._free)) * self.block_bytes,
                used_bytes_max=self._used_max * self.block_bytes,
                waiting=len(self._waiting),
                huge_pages=self.huge_pages,
            )

    def _serve(self) -> None:
        """Serve from the front, and nobody behind a ticket that does not fit yet: a large one must not starve."""
        while self._waiting and self._waiting[0].blocks <= len(self._free):
            ticket = self._waiting.popleft()
            ticket.rows = np.array(sorted(self._free[len(self._free) - ticket.blocks :]), np.int64)
            del self._free[len(self._free) - ticket.blocks :]
            self._changed.notify_all()
        self._used_max = max(self._used_max, self.blocks - len(self._free))
        assert 0 <= len(self._free) <= self.blocks

    def _wait(self, ticket: Ticket, timeout: float | None) -> bool:
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while ticket.rows is None and not ticket._released:
                self._take_late()
                left_s = min(deadline_s - time.monotonic(), LATE_S if self._late else math.inf)
                if ticket.rows is not None or left_s <= 0:
                    break
                self._changed.wait(None if left_s == math.inf else left_s)
            return ticket.rows is not None

    def _release_after(self, ticket: Ticket, transfer: Transfer) -> None:
        if transfer.released():
            self._release(ticket)
            return
        with self._changed:
            self._late.append((transfer, ticket))
            self._changed.notify_all()  # whoever waits begins to look at what is late

    def _take_late(self) -> None:
        """Take back what stores have let go of meanwhile."""
        late, self._late = self._late, []
        for transfer, ticket in late:
            if transfer.released():
                self._release(ticket)
            else:
                self._late.append((transfer, ticket))

    def _release(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket._released:
                return
            ticket._released = True
            if ticket.rows is None:
                self._waiting.remove(ticket)
            else:
                self._free += ticket.rows.tolist()
                ticket.rows = None
            self._changed.notify_all()
            self._serve()


def map_memory(size: int) -> tuple[mmap.mmap, bool]:
    """A mapping of our own, and whether it has transparent huge pages: fewer page faults and less to register."""
    # Private, because the kernel gives huge pages to shared anonymous memory only where that is configured.
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return mapping, False
    return mapping, True
