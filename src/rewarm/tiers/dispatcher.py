"""The one thread of a pool: asks drives for slices in order, merges their answers, keeps watch over their health.

It sleeps in epoll over the eventfds of the slices under way, whose number the lanes bound; nothing is polled but the
release of memory that already has its verdicts. It promises that every request gets verdicts and is released, also
when a drive hangs, fails or is full: such a drive's blocks go elsewhere if they can, else they end with their cause.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable

from rewarm.store.contract import Outcome
from rewarm.tiers.circuit import Circuit
from rewarm.tiers.lane import Lane
from rewarm.tiers.requests import Part, Request, Slice, by_outcome

log = logging.getLogger("rewarm.tiers")

TICK_S = 0.5
"""How often health is looked at while something is under way or a drive is avoided."""

RELEASE_S_MIN, RELEASE_S_MAX = 0.001, 0.05
"""Between two looks at memory that has its verdicts but is still held: a release follows its verdict at once, or,
with a hanging drive, much later."""

MOVE_S = 0.05
"""What a failed load waits for its memory before another drive is asked; after that it is a miss."""

DRIVE_FAILURES = (Outcome.LOST_MEDIUM, Outcome.TIMED_OUT)
ELSEWHERE = {True: (*DRIVE_FAILURES, Outcome.MISSING, Outcome.CORRUPT), False: (*DRIVE_FAILURES, Outcome.REFUSED_FULL)}
"""Outcomes of loads (True) and saves (False) after which another drive is asked."""

Choose = Callable[[Request, list[int], Lane], dict[Lane, list[int]]]
"""Other drives for blocks that one drive could not load or save; blocks that none can take are left out."""


Moved = Callable[[Request, Lane, dict[Outcome, list[int]]], None]
"""What a drive has done of a batch, before its memory is released: the moment to copy it on."""


class Dispatcher:
    """See the module. `settled` is called with the positions of a save that have their verdict from a drive."""

    def __init__(self, choose: Choose, settled: Callable[[Request, list[int]], None], moved: Moved) -> None:
        self.lanes: tuple[Lane, ...] = ()
        self.broken: str | None = None
        self._choose = choose
        self._settled = settled
        self._moved = moved
        self._lock = threading.Lock()
        self._inbox: list[Request] = []
        self._active: set[Request] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._given_up = False
        self._watched: dict[int, Slice] = {}
        self._ready: list[Slice] = []
        self._unreleased: list[Slice] = []
        self._release_s = RELEASE_S_MIN
        self._wakeup = -1
        self._epoll: select.epoll

    # For any thread.

    def put(self, request: Request) -> bool:
        """Hand over a request whose parts are made; False when the pool is closing or broken."""
        with self._lock:
            if self._stopping or self.broken or not self._started():
                return False
            self._inbox.append(request)
            self._active.add(request)
        self._wake()
        return True

    def given_up(self) -> None:
        """A request was cancelled or has timed out: drop what of it has not been sent."""
        self._given_up = True
        self._wake()

    def active(self) -> list[Request]:
        """The requests that are not released."""
        with self._lock:
            return list(self._active)

    def stop(self, timeout_s: float) -> bool:
        """End once nothing is under way, seconds; False when a drive still holds memory and the thread lives on."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is None:
            return True
        self._wake()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _wake(self) -> None:
        with self._lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def _started(self) -> bool:
        if self._thread is None:
            self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            self._epoll.register(self._wakeup, select.EPOLLIN)
            thread = threading.Thread(target=self._run, name="rewarm-pool", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit on threads; the next request tries again
                self._close_descriptors()
                return False
            self._thread = thread
        return True

    def _close_descriptors(self) -> None:
        self._epoll.close()
        os.close(self._wakeup)
        self._wakeup = -1

    # The thread.

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 a defect of ours must not leave callers waiting for ever
            self._break(f"rewarm-pool: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._close_descriptors()

    def _turn(self) -> bool:
        with self._lock:
            requests, self._inbox = self._inbox, []
            stopping = self._stopping
        for part in [part for request in requests for part in request.parts]:
            part.lane.add(part)
        if self._given_up:
            self._given_up = False
            self._drop_given_up()
        now_s = time.monotonic()
        for lane in self.lanes:
            self._look_after(lane, now_s)
            for piece in lane.fill(now_s):
                self._watch(piece)
        if stopping and not self.active() and not any(lane.slices for lane in self.lanes):
            return False
        ready = self._wait()
        now_s = time.monotonic()
        for piece in ready:
            self._judge(piece, now_s)
        self._end_released(now_s)
        return True

    def _watch(self, piece: Slice) -> None:
        if piece.transfer.done():
            self._ready.append(piece)
            return
        piece.descriptor = piece.transfer.fileno()
        self._watched[piece.descriptor] = piece
        self._epoll.register(piece.descriptor, select.EPOLLIN)

    def _wait(self) -> list[Slice]:
        """Sleep until slices are done; returns them. Woken up, or with something to look at, it returns earlier."""
        ready, self._ready = self._ready, []
        busy = any(lane.slices or lane.reading.reason for lane in self.lanes)
        patience_s = self._release_s if self._unreleased else TICK_S if busy else None
        for descriptor, _ in self._epoll.poll(0 if ready else patience_s):
            if descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
            else:
                self._epoll.unregister(descriptor)
                ready.append(self._watched.pop(descriptor))
        return ready

    # Verdicts.

    def _judge(self, piece: Slice, now_s: float) -> None:
        self._unreleased.append(piece)
        self._release_s = RELEASE_S_MIN
        piece.judged_s = now_s
        if piece.answered:
            return  # it hung, and what it held went elsewhere
        piece.answered = True
        outcomes = piece.transfer.outcomes
        if piece.request is None:
            self._book(piece.lane, piece.lane.reading, outcomes[0] is Outcome.HIT, "still fails", now_s)
            return
        request, lane = piece.request, piece.lane
        found = by_outcome(piece.positions, outcomes)
        self._note_health(lane, request, found, now_s)
        self._moved(request, lane, found)
        if request.loading:
            count = sum(request.lengths[position] for position in found.get(Outcome.HIT, []))
            lane.meter.moved(count, now_s, idle=lane.load_bytes == piece.bytes)
        for outcome, positions in found.items():
            if request.loading and outcome in ELSEWHERE[True]:
                piece.failed[outcome] = positions  # until the memory is ours: a late read must not meet another's bytes
            else:
                self._verdict(request, lane, positions, outcome)

    def _verdict(
        self, request: Request, lane: Lane, positions: list[int], outcome: Outcome, *, may_move: bool = True
    ) -> None:
        """Ask another drive, or settle."""
        if may_move and outcome in ELSEWHERE[request.loading] and not request.transfer.done():
            moved: set[int] = set()
            for other, taken in self._choose(request, positions, lane).items():
                other.add(Part(request, other, taken))
                moved.update(taken)
            positions = [position for position in positions if position not in moved]
        if not request.loading:
            self._settled(request, positions)
        request.transfer.settle(positions, outcome)

    def _end_released(self, now_s: float) -> None:
        looked_at, self._unreleased = self._unreleased, []
        for piece in looked_at:
            released = piece.transfer.released()
            if piece.failed and (released or now_s - piece.judged_s > MOVE_S):
                failed, piece.failed = piece.failed, {}
                assert piece.request is not None
                for outcome, positions in failed.items():
                    self._verdict(piece.request, piece.lane, positions, outcome, may_move=released)
            if not released:
                self._unreleased.append(piece)
                continue
            piece.lane.ended(piece, now_s)
            if piece.request is not None:
                piece.request.slices -= 1
                self._release_if_over(piece.request)
        self._release_s = min(2 * self._release_s, RELEASE_S_MAX)

    def _release_if_over(self, request: Request) -> None:
        if not request.over():
            return
        if request not in self.active():
            return
        request.account.add(borrowed_bytes=-request.borrowed_bytes, queued_bytes=-request.queued_bytes)
        request.parts.clear()  # they point back: the caller's memory must not wait for the garbage collector
        request.ended()
        request.transfer.release()
        with self._lock:
            self._active.discard(request)  # last: who finds it gone may rely on all of the above

    def _drop_given_up(self) -> None:
        given_up = [request for request in self.active() if request.transfer.done()]
        for request in given_up:
            for part in request.parts:
                part.lane.remove(part)
                positions = part.drop()
                if not request.loading:
                    self._settled(request, positions)
        for lane in self.lanes:
            for piece in lane.slices:
                if piece.request is not None and piece.request.transfer.done():
                    piece.transfer.cancel()
        for request in given_up:
            self._release_if_over(request)

    # Health.

    def _note_health(self, lane: Lane, request: Request, found: dict[Outcome, list[int]], now_s: float) -> None:
        failures = [outcome for outcome in DRIVE_FAILURES if outcome in found]
        if request.loading:
            if Outcome.HIT in found:
                self._book(lane, lane.reading, True, "", now_s)
            elif failures:
                self._remember(lane, request, found[failures[0]][0])
                self._book(lane, lane.reading, False, f"reads end as {failures[0]}", now_s)
        elif Outcome.STORED in found:
            self._book(lane, lane.writing, True, "", now_s)
        elif failures or Outcome.REFUSED_FULL in found:
            reason = f"writes end as {failures[0]}" if failures else "full"
            self._book(lane, lane.writing, False, reason, now_s)

    def _book(self, lane: Lane, circuit: Circuit, good: bool, reason: str, now_s: float) -> None:
        kind = "reading" if circuit is lane.reading else "writing"
        if good:
            if circuit.succeed():
                log.warning("drive %s: %s works again", lane.name, kind)
            return
        if circuit.fail(reason, now_s):
            log.warning("drive %s: %s is avoided: %s", lane.name, kind, reason)
        parts = list(lane.loads) if circuit is lane.reading else []
        parts += lane.saves
        outcome = Outcome.REFUSED_FULL if reason == "full" else Outcome.LOST_MEDIUM
        for part in parts:
            lane.remove(part)
            self._verdict(part.request, lane, part.drop(), Outcome.LOST_MEDIUM if part.request.loading else outcome)
            self._release_if_over(part.request)

    def _look_after(self, lane: Lane, now_s: float) -> None:
        """Notice a drive that hangs; try one whose reads have failed. Its saves are tried by the next save."""
        for circuit, loading in ((lane.reading, True), (lane.writing, False)):
            if lane.stalled(now_s, loading=loading) and circuit.allows(now_s):
                self._give_up_held(lane, circuit, now_s, loading=loading)
        if lane.reading.due(now_s) and lane.trial is None:
            trial = lane.start_trial(now_s)
            if trial is not None:
                self._watch(trial)
            else:
                self._book(lane, lane.reading, True, "", now_s)

    def _give_up_held(self, lane: Lane, circuit: Circuit, now_s: float, *, loading: bool) -> None:
        """Avoid a drive that hangs: what it was to load is a miss, what it was to save goes elsewhere."""
        held = lane.held(loading=loading)
        self._book(lane, circuit, False, f"holds {len(held)} batches and ends none", now_s)
        for piece in held:
            request = piece.request
            if request is not None and not piece.answered:
                self._remember(lane, request, piece.positions[0])
                piece.answered = True
                self._verdict(request, lane, piece.positions, Outcome.LOST_MEDIUM, may_move=not loading)
                piece.transfer.cancel()

    def _remember(self, lane: Lane, request: Request, position: int) -> None:
        lane.failed_block = request.keys[position], request.lengths[position]

    def _break(self, why: str) -> None:
        """A defect: say so, answer everything that waits, and hold memory until the drives have let go of it."""
        log.error("%s", why)
        with self._lock:
            self.broken = why
        active = self.active()
        for request in active:
            request.transfer.settle(request.transfer.pending(), Outcome.LOST_MEDIUM)
        for piece in [piece for lane in self.lanes for piece in lane.slices]:
            piece.transfer.cancel()
            piece.transfer.wait_released()
        for request in active:
            request.slices = request.unsent_bytes = 0  # no lane will send what waits there
            self._release_if_over(request)
