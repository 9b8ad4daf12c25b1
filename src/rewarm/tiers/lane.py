"""One drive of a pool: its store, what waits for it, what it has been asked for, its health and its speed.

A lane hands its store slices of a few milliseconds, so that the order of requests is decided late, and enough of them
that the drive never runs dry. Only the pool's thread uses it, but for `held`, `usable_for_saves` and the figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from rewarm.errors import MisuseError
from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.store.transfer import Counters, settled_transfer
from rewarm.tiers.circuit import Circuit, Meter
from rewarm.tiers.decide import MediumState, Queue
from rewarm.tiers.order import RestoreOrder
from rewarm.tiers.requests import Buffers, Part, Slice, private_buffer

WINDOW_S = 0.02
"""A drive is asked for so many seconds of its own speed at once: longer than this thread may wait for the
interpreter lock beside a busy one (5 ms), short enough that the next request does not wait for it."""

WINDOW_BYTES_MIN = 8 << 20
WINDOW_BYTES_START = 16 << 20
WINDOW_BYTES_MAX = 64 << 20
"""The same in bytes: for slow drives, before the speed is known, and as much as a store keeps in flight anyway."""

SLICES_PER_WINDOW = 4
SLICE_BLOCKS = 1024
"""As many blocks as a store plans at a time."""

SAVE_WINDOW_BYTES = 64 << 20
SAVE_SLICE_BYTES = 16 << 20
SAVE_SLICES_MAX = 32
"""What a store is asked to write at once; the rest waits here, so that a drive that fails holds little."""

LOAD_STALL_S = 5.0
SAVE_STALL_S = 20.0
"""A drive that holds batches of a kind and has ended none for so long is avoided until one ends. A write may wait for a
whole cache to be synced, and nobody waits for it; a read that takes seconds is already too late."""


class DriveStats(msgspec.Struct, frozen=True, kw_only=True):
    """One drive of a pool. `reads` and `saves` are `ok`, or why the drive is avoided; `share` is its part of saves."""

    drive: str
    device: str
    reads: str
    saves: str
    read_bytes_per_s: float | None
    share: float
    capacity_bytes: int
    used_bytes: int


class Lane:
    """See the module. `name` is what messages call the drive."""

    def __init__(self, name: str, store: Store, ageing: float) -> None:
        self.name = name
        self.store = store
        self.loads: RestoreOrder[Part] = RestoreOrder(ageing)
        self.saves: deque[Part] = deque()
        self.reading = Circuit()
        self.writing = Circuit()
        self.meter = Meter()
        self.slices: set[Slice] = set()
        self.load_bytes = 0
        self._progress_s = {True: 0.0, False: 0.0}
        self.failed_block: tuple[bytes, int] | None = None
        self.trial: Slice | None = None
        self._save_bytes = 0
        self._save_slices = 0

    @property
    def window_bytes(self) -> int:
        """Bytes of loads that the drive is asked for at once."""
        speed = self.meter.bytes_per_s
        if speed is None:
            return WINDOW_BYTES_START
        return min(max(int(speed * WINDOW_S), WINDOW_BYTES_MIN), WINDOW_BYTES_MAX)

    def usable_for_saves(self, now_s: float) -> bool:
        """True unless the drive is avoided, or is a raw pool that somebody else owns."""
        if getattr(self.store, "read_only", False):
            return False
        return self.reading.reason is None and self.writing.allows(now_s)

    def add(self, part: Part) -> None:
        """Blocks to load or save."""
        if part.request.loading:
            self.loads.add(part)
        else:
            self.saves.append(part)

    def remove(self, part: Part) -> None:
        """Blocks that nobody wants any more."""
        if part.request.loading:
            self.loads.remove(part)
        elif part in self.saves:
            self.saves.remove(part)

    def fill(self, now_s: float) -> list[Slice]:
        """Ask the store for what the order says comes next, as far as the windows allow."""
        return [*self._fill_loads(now_s), *self._fill_saves(now_s)]

    def holds(self, key: bytes) -> bool:
        """True when the drive can be asked for a block."""
        try:
            return key in self.store
        except MisuseError:  # the pool is being closed
            return False

    def start_trial(self, now_s: float) -> Slice | None:
        """Read the block that failed last, into memory of our own; None when there is none to try."""
        if self.failed_block is None or not self.holds(self.failed_block[0]):
            return None
        key, size = self.failed_block
        transfer = self._ask([key], [private_buffer(size)], loading=True)
        self.trial = self._begin(Slice(self, None, [0], 0, transfer), now_s)
        return self.trial

    def ended(self, piece: Slice, now_s: float) -> None:
        """The store has given back the memory of a slice."""
        self.slices.discard(piece)
        self._progress_s[piece.loading] = now_s
        if piece.request is None:
            self.trial = None
        elif piece.request.loading:
            self.load_bytes -= piece.bytes
        else:
            self._save_bytes -= piece.bytes
            self._save_slices -= 1

    def held(self, *, loading: bool) -> list[Slice]:
        """Batches of a kind that the store has not given back."""
        return [piece for piece in self.slices if piece.loading == loading]

    def stalled(self, now_s: float, *, loading: bool) -> bool:
        """True when the store holds batches of a kind and has ended none for long."""
        limit_s = LOAD_STALL_S if loading else SAVE_STALL_S
        return now_s - self._progress_s[loading] > limit_s and bool(self.held(loading=loading))

    def state(self) -> MediumState:
        """Bandwidth and queue at this moment. From any thread."""
        speed = self.meter.bytes_per_s
        queue = Queue.of(self.load_bytes, self.loads.queue())
        return MediumState(bytes_per_s=math.inf if speed is None else speed, queue=queue)

    def drive_stats(self, share: float) -> DriveStats:
        """Figures of this drive."""
        stats = self.store.stats()
        return DriveStats(
            drive=self.name,
            device=stats.device,
            reads=self.reading.reason or "ok",
            saves=self.writing.reason or self.reading.reason or "ok",
            read_bytes_per_s=self.meter.bytes_per_s,
            share=share,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.used_bytes,
        )

    def _fill_loads(self, now_s: float) -> list[Slice]:
        started = []
        slice_bytes = self.window_bytes // SLICES_PER_WINDOW
        while self.load_bytes < self.window_bytes:
            part = self.loads.next(slice_bytes)
            if part is None:
                break
            piece = self._slice(part, slice_bytes, now_s)
            self.loads.served(part, piece.bytes)
            if not part.unsent_bytes:
                self.loads.remove(part)
            if not self.load_bytes:
                self.meter.begin(now_s)
            self.load_bytes += piece.bytes
            started.append(piece)
        return started

    def _fill_saves(self, now_s: float) -> list[Slice]:
        started = []
        while self.saves and self._save_bytes < SAVE_WINDOW_BYTES and self._save_slices < SAVE_SLICES_MAX:
            part = self.saves[0]
            piece = self._slice(part, SAVE_SLICE_BYTES, now_s)
            if not part.unsent_bytes:
                self.saves.popleft()
            self._save_bytes += piece.bytes
            self._save_slices += 1
            started.append(piece)
        return started

    def _slice(self, part: Part, limit_bytes: int, now_s: float) -> Slice:
        request = part.request
        positions, count = part.take(limit_bytes, SLICE_BLOCKS)
        keys = [request.keys[position] for position in positions]
        transfer = self._ask(keys, request.memory(positions), loading=request.loading)
        request.slices += 1
        return self._begin(Slice(self, request, positions, count, transfer), now_s)

    def _ask(self, keys: Sequence[bytes], buffers: Buffers, *, loading: bool) -> Transfer:
        try:
            return self.store.load(keys, buffers) if loading else self.store.save(keys, buffers)
        except MisuseError:  # the pool is being closed
            return settled_transfer(len(keys), Outcome.CANCELLED, Counters(), loading=loading)

    def _begin(self, piece: Slice, now_s: float) -> Slice:
        if not self.held(loading=piece.loading):
            self._progress_s[piece.loading] = now_s
        self.slices.add(piece)
        return piece
