"""A pool: several drives behind one store. Consecutive blocks are spread, so that one request uses all of them.

Every drive is a store of its own, which opens without the others. A block is found by asking the drives' indexes, in
memory; there is no table of places to lose. A drive that is lost, hangs or is full costs its own blocks only; it is
avoided, with the reason in `stats`, and tried again. Loads are served shortest remaining first, with an ageing bound.

It does not move or copy blocks between drives, and it does not open when one of its drives cannot be opened.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, MisuseError
from rewarm.store import forks
from rewarm.store.buffers import borrow, hold
from rewarm.store.contract import (
    SAVE_QUEUE_BYTES,
    Buffers,
    CheckReport,
    Outcome,
    Pin,
    Presence,
    Stats,
    Store,
    check_keys,
)
from rewarm.store.transfer import BatchTransfer, Counters
from rewarm.tiers.decide import MediumState
from rewarm.tiers.dispatcher import Dispatcher
from rewarm.tiers.lane import DriveStats, Lane
from rewarm.tiers.order import AGEING
from rewarm.tiers.placement import Placement, shares
from rewarm.tiers.requests import Part, Request
from rewarm.tiers.summing import PoolPin, merged_report, merged_stats

CLOSE_TIMEOUT_S = 30.0
CANCEL_S = 1.0
"""What `close` allows the pool's thread to end once the drives are closed."""


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the whole pool. `ageing` 0 is arrival order, see `RestoreOrder`."""

    ageing: float = AGEING
    save_queue_bytes: int = SAVE_QUEUE_BYTES
    close_timeout_s: float = CLOSE_TIMEOUT_S


class PoolStore:
    """A `Store` over the stores of drives, which it closes. Made by `rewarm.open("pool:?drive=..&drive=..")`.

    `drives` names each store; the names stand in messages and in `drives()`.
    """

    _hops = 1
    """How many saves in a row one save may lead to."""

    def __init__(self, drives: Sequence[tuple[str, Store]], settings: PoolSettings | None = None) -> None:
        if not drives:
            raise ConfigError("a pool needs at least one drive")
        self._settings = settings or PoolSettings()
        self._counters = Counters()
        self._lock = threading.Lock()
        self._placement = Placement()
        self._placing: dict[bytes, dict[Request, Lane]] = {}
        self._forks = forks.count
        self._closed = False
        self._drives: tuple[Lane, ...] = ()
        self._dispatcher = Dispatcher(self._elsewhere, self._saved, self._moved)
        for name, store in drives:
            self.add_drive(name, store)

    def add_drive(self, name: str, store: Store) -> None:
        """One more drive from now on: it gets its share of every later save. Also while others use the pool."""
        self._usable()
        lane = Lane(name, store, self._settings.ageing)
        with self._lock:
            if any(name == other.name for other in self._lanes):
                raise ConfigError(f"drive {name} is already in the pool")
            self._placement.add_drive(store.stats().used_bytes)
            self._drives = (*self._drives, lane)
            self._dispatcher.lanes = (*self._lanes, lane)

    def drives(self) -> list[DriveStats]:
        """State, speed and share of every drive."""
        lanes = self._drives
        return [lane.drive_stats(share) for lane, share in zip(lanes, self._shares(lanes), strict=True)]

    def places(self, keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
        """Number (in `media()`) of the drive that holds each key, shape (keys,); -1 for none. Reads memory only."""
        self._usable()
        check_keys(keys)
        return self._places(keys)

    def media(self) -> list[MediumState]:
        """Measured bandwidth and queue of every drive at this moment, for `decide`."""
        return [lane.state() for lane in self._lanes]

    # The data path.

    def lookup(self, keys: Sequence[bytes]) -> Presence:
        """Which keys are held by a drive that is not avoided. Reads memory only."""
        self._usable()
        check_keys(keys)
        return Presence.of(self._places(keys) >= 0)

    def __contains__(self, key: bytes) -> bool:
        # An engine's scheduler asks this for every block: the drives check key and handle, once is enough.
        for lane in self._dispatcher.lanes:  # noqa: SIM110  a generator costs as much as the look-up
            if lane.reading.reason is None and key in lane.store:
                return True
        return False

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Read blocks from all drives at once into the caller's writable buffers."""
        self._usable()
        check_keys(keys)
        borrowed = borrow(buffers, len(keys), writable=True)
        memory = buffers if isinstance(buffers, np.ndarray) else borrowed.views
        transfer = BatchTransfer(len(keys), self._counters, loading=True, wake=self._dispatcher.given_up)
        request = Request(transfer, self._counters, list(keys), memory, borrowed.lengths.tolist(), loading=True)
        lanes = self._lanes
        places = self._places(keys, lanes)
        transfer.settle(np.flatnonzero(places < 0), Outcome.MISSING)
        for number, lane in enumerate(lanes):
            mine = np.flatnonzero(places == number).tolist()
            if mine:
                Part(request, lane, mine)
        return self._start(request)

    def save(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Queue blocks for writing on all drives. True in `wait` means published, or already there."""
        self._usable()
        check_keys(keys)
        held, sizes = hold(buffers, len(keys))
        transfer = BatchTransfer(len(keys), self._counters, loading=False, wake=self._dispatcher.given_up)
        known = self._kept(keys)
        transfer.settle(np.flatnonzero(known), Outcome.ALREADY)
        wanted = np.flatnonzero(~known).tolist()
        count = within_budget(self._counters, [sizes[position] for position in wanted], self._settings.save_queue_bytes)
        transfer.settle(wanted[count:], Outcome.REFUSED_BUDGET)
        request = Request(transfer, self._counters, list(keys), held, sizes, loading=False)
        request.queued_bytes = sum(sizes[position] for position in wanted[:count])
        for lane, positions in self._placed(request, wanted[:count]).items():
            Part(request, lane, positions)
        return self._start(request)

    def _start(self, request: Request) -> BatchTransfer:
        transfer = request.transfer
        if not request.parts:
            transfer.release()
            return transfer
        request.account.add(borrowed_bytes=request.borrowed_bytes)
        if not self._dispatcher.put(request):
            positions = [position for part in request.parts for position in part.drop()]
            request.account.add(borrowed_bytes=-request.borrowed_bytes, queued_bytes=-request.queued_bytes)
            if not request.loading:
                self._saved(request, positions)
            transfer.settle(positions, Outcome.LOST_MEDIUM)
            request.parts.clear()
            request.ended()
            transfer.release()
        return transfer

    # Where blocks are and go.

    @property
    def _persistent(self) -> tuple[Lane, ...]:
        """Lanes of media that keep blocks when the process ends."""
        return self._dispatcher.lanes

    @property
    def _lanes(self) -> tuple[Lane, ...]:
        return self._dispatcher.lanes

    def _kept(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which keys need not be saved, shape (keys,)."""
        return self._places(keys) >= 0

    def _moved(self, request: Request, lane: Lane, found: dict[Outcome, list[int]]) -> None:
        """A drive has done something; a pool keeps no copies."""

    def _shares(self, lanes: Sequence[Lane]) -> list[float]:
        return shares([lane.meter.bytes_per_s for lane in lanes])

    def _places(self, keys: Sequence[bytes], lanes: Sequence[Lane] | None = None) -> npt.NDArray[np.int64]:
        """Number of the first drive that holds each key, shape (keys,); -1 for none."""
        places = np.full(len(keys), -1, np.int64)
        for number, lane in enumerate(self._lanes if lanes is None else lanes):
            if lane.reading.reason is None:
                places[lane.store.lookup(keys).mask & (places < 0)] = number
        return places

    def _placed(self, request: Request, positions: list[int]) -> dict[Lane, list[int]]:
        """Blocks of a save by drive. A key that is being saved already goes to the same drive, which notices."""
        placed: dict[Lane, list[int]] = {}
        now_s = time.monotonic()
        with self._lock:
            lanes = self._drives
            share = self._shares(lanes)
            healthy = [number for number, lane in enumerate(lanes) if lane.usable_for_saves(now_s)]
            usable = healthy or range(len(lanes))  # with none left, the drives themselves give the reason
            for position in positions:
                users = self._placing.setdefault(request.keys[position], {})
                lane = next(iter(users.values()), None)
                lane = lane or lanes[self._placement.choose(request.lengths[position], share, usable)]
                users[request] = lane
                placed.setdefault(lane, []).append(position)
        return placed

    def _saved(self, request: Request, positions: list[int]) -> None:
        """These blocks of a save are no longer on their way to a drive."""
        with self._lock:
            for position in positions:
                users = self._placing.get(request.keys[position], {})
                users.pop(request, None)
                if not users:
                    self._placing.pop(request.keys[position], None)

    def _others(self, request: Request) -> Sequence[Lane]:
        """Where blocks of a request may go instead, best first."""
        return self._lanes

    def _elsewhere(self, request: Request, positions: list[int], lane: Lane) -> dict[Lane, list[int]]:
        now_s = time.monotonic()
        placed: dict[Lane, list[int]] = {}
        for position in positions:
            tried = request.tried.setdefault(position, [])
            tried.append(lane)
            for other in self._others(request):
                usable = other.reading.reason is None if request.loading else other.usable_for_saves(now_s)
                if other not in tried and usable and (not request.loading or other.holds(request.keys[position])):
                    placed.setdefault(other, []).append(position)
                    break
        return placed

    # Keeping and dropping.

    def pin(self, keys: Sequence[bytes]) -> Pin:
        """Keep this handle from evicting these keys on any drive until the pin is released."""
        self._usable()
        check_keys(keys)
        return PoolPin([lane.store.pin(keys) for lane in self._lanes], len(keys))

    def evict(self, to_bytes: int) -> int:
        """Drop the oldest of every drive until at most `to_bytes` are used in all; returns bytes freed."""
        self._usable()
        if to_bytes < 0:
            raise MisuseError(f"to_bytes must not be negative, got {to_bytes}")
        self.refresh()
        lanes = self._drives
        used = [lane.store.stats().used_bytes for lane in lanes]
        total = max(sum(used), 1)
        freed = sum(lane.store.evict(to_bytes * mine // total) for lane, mine in zip(lanes, used, strict=True))
        left = sum(lane.store.stats().used_bytes for lane in lanes)
        return max(freed, sum(used) - left)  # a drive does not credit the logs that go with their last segment

    def erase(self) -> int:
        """Remove every block of this handle's namespace from every drive; returns bytes freed."""
        self._drain()
        return sum(lane.store.erase() for lane in self._lanes)

    def flush(self) -> None:
        """Wait until everything saved so far is published and synced on every drive."""
        self._drain()
        for lane in self._lanes:
            lane.store.flush()

    def _drain(self) -> None:
        self._usable()
        self._wait_for_saves(math.inf)

    def _wait_for_saves(self, timeout_s: float) -> None:
        """Wait for saves, and for the copies that they and other copies lead to, seconds."""
        deadline_s = time.monotonic() + timeout_s
        for _ in range(self._hops):
            for request in self._dispatcher.active():
                if not request.loading:
                    left_s = deadline_s - time.monotonic()
                    request.transfer.wait_released(None if left_s == math.inf else max(left_s, 0))

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify every file and block of every drive; with `fix` repair or remove what is damaged."""
        self._usable()
        return merged_report([(lane.name, lane.store.check(fix=fix)) for lane in self._lanes])

    def refresh(self) -> None:
        """Read what other writers have published on any drive since the last poll."""
        self._each(lambda store: store.refresh())

    def register(self, arena: Any) -> int:
        """Announce memory to every drive; returns the bytes that all of them have registered."""
        self._usable()
        return min(lane.store.register(arena) for lane in self._persistent)

    def stats(self) -> Stats:
        """Blocks and outcomes as the callers of this pool saw them; bytes are sums over the drives."""
        return merged_stats(
            self._counters, [lane.store.stats() for lane in self._lanes], self.drives(), self._dispatcher.broken
        )

    def _each(self, verb: Callable[[Store], object]) -> None:
        self._usable()
        for lane in self._lanes:
            verb(lane.store)

    # Life.

    def close(self) -> None:
        """Finish queued saves within a bounded time, stop the thread, close the drives. Idempotent."""
        if self._closed or forks.count != self._forks:
            return
        self._closed = True
        self._wait_for_saves(self._settings.close_timeout_s)
        for request in self._dispatcher.active():
            request.transfer.cancel()
        for lane in self._lanes:
            lane.store.close()
        self._dispatcher.stop(CANCEL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _usable(self) -> None:
        if self._closed:
            raise MisuseError("this pool is closed; open it again")
        if forks.count != self._forks:
            raise MisuseError("this pool was opened before fork; open it in the child process")


def within_budget(account: Counters, sizes: list[int], limit: int) -> int:
    """How many blocks from the front a queue of `limit` bytes takes now; their bytes are reserved."""
    if account.reserve(sum(sizes), limit):
        return len(sizes)
    for count, size in enumerate(sizes):
        if not account.reserve(size, limit):
            return count
    return len(sizes)
