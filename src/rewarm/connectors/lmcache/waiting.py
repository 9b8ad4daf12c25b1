"""What LMCache's tasks wait for: transfers until their memory is free, and locks until they are given back.

A transfer is over when its verdicts are in *and* the store has released its memory. A deadline settles the verdicts;
LMCache may use the memory again only after the release, so nothing is reported before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import msgspec

from rewarm.store.contract import Pin, Transfer

log = logging.getLogger("rewarm.lmcache")

POLL_S = 0.01
"""A release has no descriptor; it comes with the last verdict or at once after it, except after a deadline."""
LOCK_S = 600.0
"""LMCache gives up some look-ups without unlocking them; no request lives longer than this."""


class _Job(msgspec.Struct, eq=False):
    transfer: Transfer
    end_s: float
    over: Callable[[], None]
    late: bool = False


class Completions:
    """One thread that calls `over()` once for every transfer it was given."""

    def __init__(self) -> None:
        self._jobs: list[_Job] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="rewarm-lmcache", daemon=True)
        self._thread.start()
        self.alive = self._thread.is_alive

    def add(self, transfer: Transfer, limit_s: float, over: Callable[[], None]) -> None:
        """Watch a transfer; what has no verdict after `limit_s` seconds times out."""
        with self._lock:
            self._jobs.append(_Job(transfer, time.monotonic() + limit_s, over))
        self._nudge()

    def stop(self, timeout_s: float) -> bool:
        """End once every transfer is over, seconds; False when the storage still holds memory then."""
        self._stopping = True
        self._nudge()
        self._thread.join(timeout_s)
        if self.alive():
            return False
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
        return True

    def _nudge(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while self._jobs or not self._stopping:
            with self._lock:
                ended = [job for job in self._jobs if _is_over(job)]
                self._jobs = [job for job in self._jobs if job not in ended]
            for job in ended:
                try:
                    job.over()
                except Exception:  # what listeners of LMCache raise must not end the thread
                    log.exception("rewarm: a listener of LMCache failed")
            self._sleep()

    def _sleep(self) -> None:
        """Until a verdict, a new transfer, or the nearest deadline."""
        poller, waits_s = select.poll(), [LOCK_S]
        poller.register(self._wake, select.POLLIN)
        with self._lock:
            for job in self._jobs:
                waits_s.append(POLL_S if job.transfer.done() else job.end_s - time.monotonic())
                if not job.transfer.done():
                    poller.register(job.transfer.fileno(), select.POLLIN)
        if self._jobs or not self._stopping:
            poller.poll(max(0.0, min(waits_s)) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)


def _is_over(job: _Job) -> bool:
    if not job.transfer.done() and job.end_s <= time.monotonic():
        job.transfer.wait(0)
    if job.late or not job.transfer.done():
        return job.late and job.transfer.released()
    job.late = not job.transfer.wait_released(POLL_S)
    return not job.late


class _Lease(msgspec.Struct, eq=False):
    pin: Pin
    held: int
    end_s: float


class Locks:
    """Counted locks on keys, from any thread: the pin of a look-up is held until all of its keys are unlocked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: dict[Hashable, deque[_Lease]] = {}
        """Locked keys, each with its leases, oldest first."""
        self._leases: deque[_Lease] = deque()

    def lock(self, keys: Sequence[Hashable], pin: Pin) -> None:
        """Hold a pin until each of these keys was unlocked once more, or for `LOCK_S`."""
        lease = _Lease(pin, len(keys), time.monotonic() + LOCK_S)
        self.release(time.monotonic())
        with self._lock:
            self._leases.append(lease)
            for key in keys:
                self.held.setdefault(key, deque()).append(lease)

    def unlock(self, keys: Sequence[Hashable]) -> None:
        """Take one lock off each key; a key without one is left alone."""
        with self._lock:
            for key in keys:
                leases = self.held.get(key, deque())
                if leases:
                    lease = leases.popleft()
                    lease.held -= 1
                    if not lease.held:
                        lease.pin.release()
                if not leases:
                    self.held.pop(key, None)

    def release(self, now_s: float) -> None:
        """Let go of what should have been unlocked before `now_s`."""
        with self._lock:
            while self._leases and (not self._leases[0].held or self._leases[0].end_s <= now_s):
                late = self._leases.popleft()
                late.pin.release()
                if late.held:
                    self.held = {key: of for key, of in self.held.items() if of[-1] is not late or of[0] is not late}
