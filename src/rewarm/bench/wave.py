"""One wave: many requests start at one moment, each restores its whole prefix from a store.

The client is one thread that submits every `load` and then waits on the transfers' event descriptors. Time counts from
the intended start, which is the same for all: what a request waits in the client, in the store's queue or for the
medium is in its time. A block that is not a hit is a failure of its request, and never counts as bytes that came back.
"""

from __future__ import annotations

import select
import time
from collections import Counter
from dataclasses import dataclass, field

from rewarm.bench.counters import Snapshot, take_snapshot
from rewarm.bench.destination import Destinations, Region
from rewarm.bench.payload import Payload
from rewarm.bench.raw import Arena
from rewarm.errors import StorageError
from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.workload.sessions import Sessions

SLOWEST_BYTES_PER_S = 10e6
"""A wave may take as long as its bytes take at this rate, and half a minute more; what is open then has timed out."""
_GRACE_S = 30.0
RELEASE_S = 60.0
"""How long after the end of a wave the kernel may still hold our memory before the run is given up."""


@dataclass
class Restore:
    """One request under way and what became of it. `last_byte_s` counts from the wave's start."""

    session: int
    keys: list[bytes]
    numbers: range
    next_slice: int = 0
    open_slices: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    hit_blocks: list[tuple[int, Arena]] = field(default_factory=list)
    hit_bytes: int = 0
    wrong_blocks: int = 0
    last_byte_s: float = 0.0

    @property
    def hits(self) -> int:
        """Blocks that came back."""
        return self.outcomes[Outcome.HIT]


@dataclass(frozen=True)
class _Slice:
    """A transfer in flight: which request it serves, in which slot, and with which memory."""

    restore: Restore
    request: int
    slot: int
    blocks: range
    buffers: list[Arena]
    transfer: Transfer


@dataclass(frozen=True)
class WaveReading:
    """What a wave measured. `seconds` is the time to the last byte that came back, 0 when none did; `counted` is
    the kernel's view of the whole wave."""

    restores: list[Restore]
    seconds: float
    counted: Snapshot
    client_cpu_s: float
    whole: bool


class Wave:
    """Runs waves on one store. Not thread-safe; the store must hold the sessions already."""

    def __init__(self, store: Store, sessions: Sessions, payload: Payload, destinations: Destinations) -> None:
        self._store = store
        self._sessions = sessions
        self._payload = payload
        self._destinations = destinations

    def run(self, concurrency: int, device_number: tuple[int, int] | None = None) -> WaveReading:
        """Restore sessions 0 to `concurrency` - 1 together. Raises `StorageError` when the medium keeps our memory."""
        region = self._destinations.region(concurrency)
        restores = [Restore(s, self._sessions.keys(s), self._sessions.numbers(s)) for s in range(concurrency)]
        self._destinations.poison()
        limit_s = _GRACE_S + concurrency * self._sessions.bytes_per_session / SLOWEST_BYTES_PER_S
        client_before, before = time.thread_time(), take_snapshot(device_number)
        self._serve(region, restores, time.monotonic(), limit_s)
        counted = take_snapshot(device_number).since(before)
        client_cpu_s = time.thread_time() - client_before
        for restore in restores:
            self._compare(restore)
        seconds = max(restore.last_byte_s for restore in restores)
        return WaveReading(restores, seconds, counted, client_cpu_s, region.whole)

    def _serve(self, region: Region, restores: list[Restore], start: float, limit_s: float) -> None:
        """Drive all requests to their end, or to the limit; on the way out no memory of ours is in the kernel."""
        flying: dict[int, _Slice] = {}
        poll = select.epoll()
        try:
            for slot in range(region.slots):
                for request, restore in enumerate(restores):
                    self._submit(region, restore, request, slot, flying, poll)
            while flying and (left := start + limit_s - time.monotonic()) > 0:
                ready = poll.poll(left)
                now = time.monotonic() - start
                for descriptor, _ in ready:
                    poll.unregister(descriptor)
                    piece = flying.pop(descriptor)
                    self._settle(region, piece, now)
                    self._submit(region, piece.restore, piece.request, piece.slot, flying, poll)
        finally:
            poll.close()
            for piece in flying.values():
                piece.transfer.wait(0)  # what has no verdict has timed out
            for piece in flying.values():
                self._settle(region, piece, time.monotonic() - start)

    def _submit(
        self,
        region: Region,
        restore: Restore,
        request: int,
        slot: int,
        flying: dict[int, _Slice],
        poll: select.epoll,
    ) -> None:
        """Start the next slice of a request in a free slot; nothing when there is none left."""
        if restore.next_slice == len(region.slices):
            return
        blocks = region.slices[restore.next_slice]
        restore.next_slice += 1
        buffers = self._destinations.buffers(region, request, slot, blocks)
        transfer = self._store.load(restore.keys[blocks.start : blocks.stop], buffers)
        descriptor = transfer.fileno()
        flying[descriptor] = _Slice(restore, request, slot, blocks, buffers, transfer)
        poll.register(descriptor, select.EPOLLIN)

    def _settle(self, region: Region, piece: _Slice, now: float) -> None:
        """Book a slice that has all its verdicts at `now` seconds after the start; its memory is ours again."""
        restore = piece.restore
        for block, buffer, outcome in zip(piece.blocks, piece.buffers, piece.transfer.outcomes, strict=True):
            restore.outcomes[outcome or Outcome.TIMED_OUT] += 1
            if outcome is Outcome.HIT:
                restore.hit_bytes += len(buffer)
                restore.hit_blocks.append((restore.numbers[block], buffer))
                restore.last_byte_s = now
        if not piece.transfer.wait_released(RELEASE_S):
            raise StorageError(
                f"reads are still running {RELEASE_S:.0f} s after they were given up; the medium does not answer"
            )
        if not region.whole:
            self._compare_sampled(restore)

    def _compare(self, restore: Restore) -> None:
        """Compare every byte of the blocks that are still in memory."""
        restore.wrong_blocks += sum(not self._payload.matches(*block) for block in restore.hit_blocks)
        restore.hit_blocks.clear()

    def _compare_sampled(self, restore: Restore) -> None:
        """Compare some bytes of every sector, at once: the slot is needed again."""
        restore.wrong_blocks += sum(not self._payload.matches_sampled(*block) for block in restore.hit_blocks)
        restore.hit_blocks.clear()
