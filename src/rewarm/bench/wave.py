"""One wave, or another shape: many requests start as a schedule says, each restores its whole prefix from a store.

The client is one thread that submits every `load` and then waits on the transfers' event descriptors. Time counts from
the intended start, which is the same for all: what a request waits in the client, in the store's queue or for the
medium is in its time. A block that is not a hit is a failure of its request, and never counts as bytes that came back.
"""

from __future__ import annotations

import heapq
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rewarm.bench.counters import Snapshot, take_snapshot
from rewarm.bench.destination import Destinations, pad
from rewarm.bench.payload import Payload
from rewarm.bench.raw import Arena
from rewarm.errors import StorageError
from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.workload.sessions import RankSessions, Sessions
from rewarm.workload.shapes import Ask, Client

SLOWEST_BYTES_PER_S = 10e6
"""A wave may take as long as its bytes take at this rate, and half a minute more; what is open then has timed out."""
GRACE_S = 30.0
RELEASE_S = 60.0
"""How long after the end of a wave the kernel may still hold our memory before the run is given up."""


@dataclass
class Restore:
    """One request under way and what became of it. Its intended start is `intended_s` after that of the wave; its
    other seconds count from there. `first_byte_s` is None until a block has come back."""

    session: int
    keys: list[bytes]
    numbers: Sequence[int]
    next_slice: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    unchecked: list[tuple[int, Arena]] = field(default_factory=list)
    hit_bytes: int = 0
    wrong_blocks: int = 0
    submitted_s: float = 0.0
    first_byte_s: float | None = None
    last_byte_s: float = 0.0
    intended_s: float = 0.0

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
    the kernel's view of the whole wave, `padding_bytes` and `log_bytes` the store's of what it read beside blocks."""

    restores: list[Restore]
    seconds: float
    counted: Snapshot
    client_cpu_s: float
    whole: bool
    padding_bytes: int
    log_bytes: int
    device: str


class Wave:
    """One wave of `concurrency` requests for the sessions 0 to `concurrency` - 1, which the store must hold already.

    `clients` is another schedule of them: each client's requests follow one another. `advance` hears of bytes that came
    back; `together`: the requests take turns slice by slice, so that they end together. Run it once, from one thread.
    """

    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        payload: Payload,
        destinations: Destinations,
        concurrency: int,
        advance: Callable[[float], None],
        *,
        together: bool = False,
        clients: Sequence[Client] | None = None,
    ) -> None:
        self._store = store
        self._payload = payload
        self._destinations = destinations
        self._advance = advance
        self._clients = clients or [(Ask(session, 0.0, 0),) for session in range(concurrency)]
        count = sum(len(client) for client in self._clients)
        self._restores = [Restore(s, sessions.keys(s), sessions.numbers(s)) for s in range(count)]
        self._after = {one.session: other for client in self._clients for one, other in pairwise(client)}
        self._due = sorted((client[0].delay_s, client[0].session) for client in self._clients)
        self._region = destinations.region(count, together=together)
        delays_s = max(sum(ask.delay_s for ask in client) for client in self._clients)
        self._limit_s = GRACE_S + delays_s + count * sessions.bytes_per_session / SLOWEST_BYTES_PER_S
        self._flying: dict[int, _Slice] = {}
        self._start = 0.0

    def run(
        self, device_number: tuple[int, int] | None = None, begin: Callable[[], float] = time.monotonic
    ) -> WaveReading:
        """Restore everything and compare it; `begin` gives the intended start on the monotonic clock, when all is
        ready. Raises `StorageError` when the medium keeps our memory."""
        self._destinations.poison(self._region, len(self._restores))
        known = self._store.stats()
        client_before, before = time.thread_time(), take_snapshot(device_number)
        with select.epoll() as poll:
            self._serve(poll, begin())
        counted = take_snapshot(device_number).since(before)
        stats = self._store.stats()
        client_cpu_s = time.thread_time() - client_before
        for restore in self._restores:
            self._compare(restore, self._payload.matches)
        ends = [restore.intended_s + restore.last_byte_s for restore in self._restores if restore.hits]
        seconds = max(ends, default=0.0)
        return WaveReading(
            restores=self._restores,
            seconds=seconds,
            counted=counted,
            client_cpu_s=client_cpu_s,
            whole=self._region.whole,
            padding_bytes=stats.bytes_padding - known.bytes_padding,
            log_bytes=stats.bytes_log - known.bytes_log,
            device=stats.device,
        )

    def _serve(self, poll: select.epoll, start: float) -> None:
        """Drive all requests to their end, or to the limit. When it raises, what is in flight is cancelled, and closing
        the store waits for its release."""
        self._start = start
        try:
            while (left := start + self._limit_s - time.monotonic()) > 0:
                pause_s = self._submit_due(poll)
                if not self._flying and pause_s is None:
                    break
                ready = poll.poll(left if pause_s is None else min(left, pause_s))
                now = time.monotonic() - start
                for descriptor, _ in ready:
                    poll.unregister(descriptor)
                    piece = self._flying.pop(descriptor)
                    self._settle(piece, now)
                    self._submit(piece.restore, piece.request, piece.slot, poll)
                    self._follow(piece.restore, now)
            for piece in self._flying.values():
                piece.transfer.wait(0)  # what has no verdict has timed out
            for piece in self._flying.values():
                self._settle(piece, time.monotonic() - start)
            for restore in self._restores:  # what was not even asked for has timed out, too
                restore.outcomes[Outcome.TIMED_OUT] += len(restore.keys) - restore.outcomes.total()
                restore.outcomes += Counter()  # drops what is zero
        finally:
            for piece in self._flying.values():
                piece.transfer.cancel()

    def _submit_due(self, poll: select.epoll) -> float | None:
        """Start every request that is due; returns the seconds until the next one is, None when none waits."""
        due: list[int] = []
        now = time.monotonic() - self._start
        while self._due and self._due[0][0] <= now:
            intended_s, session = heapq.heappop(self._due)
            self._restores[session].intended_s = intended_s
            due.append(session)
        for slot in range(self._region.slots):
            for session in due:
                self._submit(self._restores[session], session, slot, poll)
        return max(0.0, self._due[0][0] - (time.monotonic() - self._start)) if self._due else None

    def _follow(self, restore: Restore, now: float) -> None:
        """Make the client's next request due when this one is over."""
        after = self._after.get(restore.session)
        if after is not None and restore.outcomes.total() == len(restore.keys):
            heapq.heappush(self._due, (now + after.delay_s, after.session))

    def _submit(self, restore: Restore, request: int, slot: int, poll: select.epoll) -> None:
        """Start the next slice of a request in a free slot; nothing when there is none left."""
        if restore.next_slice == len(self._region.slices):
            return
        blocks = self._region.slices[restore.next_slice]
        restore.next_slice += 1
        buffers = self._destinations.buffers(self._region, request, slot, blocks)
        transfer = self._store.load(restore.keys[blocks.start : blocks.stop], buffers)
        if restore.next_slice == 1:
            restore.submitted_s = time.monotonic() - self._start - restore.intended_s
        self._flying[transfer.fileno()] = _Slice(restore, request, slot, blocks, buffers, transfer)
        poll.register(transfer.fileno(), select.EPOLLIN)

    def _settle(self, piece: _Slice, now: float) -> None:
        """Book a slice that has all its verdicts at `now` seconds after the start; its memory is ours again."""
        restore = piece.restore
        for block, buffer, outcome in zip(piece.blocks, piece.buffers, piece.transfer.outcomes, strict=True):
            restore.outcomes[outcome or Outcome.TIMED_OUT] += 1
            if outcome is Outcome.HIT:
                restore.hit_bytes += len(buffer)
                restore.unchecked.append((restore.numbers[block], buffer))
                restore.last_byte_s = now - restore.intended_s
        if restore.hits and restore.first_byte_s is None and piece.transfer.first_verdict_at is not None:
            restore.first_byte_s = piece.transfer.first_verdict_at - self._start - restore.intended_s
        if not piece.transfer.wait_released(RELEASE_S):
            raise StorageError(
                f"reads are still running {RELEASE_S:.0f} s after they were given up; the medium does not answer"
            )
        self._advance(sum(len(buffer) for buffer in piece.buffers))
        if not self._region.whole:
            self._compare(restore, self._payload.matches_sampled)

    def _compare(self, restore: Restore, matches: Callable[[int, Arena], bool]) -> None:
        """Compare what came back and is still in memory."""
        restore.wrong_blocks += sum(not matches(*block) for block in restore.unchecked)
        restore.unchecked.clear()


def warm_up(store: Store, sessions: Sessions, payload: Payload) -> None:
    """Restore one block, unmeasured: code that is loaded at its first use is read from a disk too, and the kernel would
    count it with the first wave."""
    one = RankSessions(sessions.seed, 1, sessions.lengths[:1], 0, (sessions.numbers(0)[0],))
    Wave(store, one, payload, Destinations(one.lengths, 1, 2 * sum(pad(one.lengths))), 1, lambda count: None).run()
