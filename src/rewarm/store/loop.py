"""The skeleton of both I/O loops: one thread that owns one device, takes jobs, and never dies silently."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import numpy as np

from rewarm.errors import MisuseError, StorageError
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import Completions, Device, Operations, Registers

log = logging.getLogger("rewarm.store")

TICK_S = 0.05
"""Longest wait before the loop looks at deadlines."""

WAKE_SHARE = 8
"""With many requests in flight, wake for an eighth of them at once: fewer wake-ups, and the queue never runs dry."""

IN_FLIGHT_BYTES_MIN = 32 << 20
IN_FLIGHT_BYTES_MAX = 256 << 20
IN_FLIGHT_S = 0.1
"""Bytes in flight: what the medium moves in this time, within these bounds. A fast one has a full queue while checksums
are computed; on a slow one a cancelled request still ends soon, and none waits for its deadline in the queue."""

PACE_S = 0.02
"""Time over which the medium's rate is taken."""

SLOWER_S = 0.5
"""Time in which the bytes in flight follow a lower rate. Beside a busy thread the loop looks late, and sees little in
one moment and much in the next: a budget that followed at once would let the queue run dry."""

Job = TypeVar("Job")

_never_freed: list[object] = []
"""Loops whose device failed with requests in the kernel: their memory may still be written to, and stays mapped."""


class Errand:
    """Something that only the loop's thread may do with its device; the answer is in `future`."""

    def __init__(self, action: Callable[[Device], int]) -> None:
        self._action = action
        self.future: Future[int] = Future()

    def run(self, device: Device) -> None:
        """Do it."""
        fulfil(self.future, lambda: self._action(device))

    def fail(self, why: str) -> None:
        """It cannot be done any more."""
        self.future.set_exception(StorageError(why))


def fulfil(future: Future[int], action: Callable[[], int]) -> None:
    """Run what somebody in another thread waits for; they get its exception, whatever it is."""
    try:
        future.set_result(action())
    except Exception as error:  # noqa: BLE001 see above
        future.set_exception(error)


class IoLoop(abc.ABC, Generic[Job]):
    """Runs `accept`, `send`, `complete`, `tidy` in its own thread, started with the first job."""

    thread_name = "rewarm-io"

    def __init__(self, device: Device, io_deadline_s: float) -> None:
        self._device = device
        self.io_deadline_s = io_deadline_s
        self.broken: str | None = None
        self._inbox: list[Job | Errand] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._cancelling = False
        self._progress_s = 0.0
        self._bytes_in_flight = 0
        self._budget = IN_FLIGHT_BYTES_MIN
        self._moved = 0
        self._moved_since_s = 0.0

    @abc.abstractmethod
    def accept(self, job: Job) -> None:
        """Take a new job."""

    @abc.abstractmethod
    def send(self) -> None:
        """Fill the device."""

    @abc.abstractmethod
    def complete(self, completions: Completions) -> None:
        """Take completions."""

    @abc.abstractmethod
    def tidy(self, now_s: float) -> None:
        """Deadlines, and whatever is due; called every turn."""

    @abc.abstractmethod
    def give_up(self, outcome: Outcome) -> None:
        """Every block without a verdict gets this one."""

    @abc.abstractmethod
    def idle(self) -> bool:
        """True when no job is left."""

    @abc.abstractmethod
    def release_all(self) -> None:
        """After a failure, with nothing left in the kernel: give back all memory, close all files."""

    def finish(self) -> None:
        """Called in the thread when it ends in good order."""

    def put(self, job: Job | Errand) -> bool:
        """Hand over a job or an errand; False when the loop is stopping or broken."""
        with self._lock:
            if self._stopping or self.broken:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the limit on threads; the next job tries again
                    return False
                self._thread = thread
            self._inbox.append(job)
        self._device.wake()
        return True

    def register(self, address: int, length: int) -> int:
        """Pin memory with this loop's device; bytes pinned, 0 where the device gains nothing from it or is gone."""

        def pin(device: Device) -> int:
            return device.register(address, length) if isinstance(device, Registers) else 0

        errand = Errand(pin)
        return errand.future.result() if self.put(errand) else 0

    def device_notes(self) -> list[str]:
        """What the kernel refused after the device was opened."""
        return list(self._device.notes) if isinstance(self._device, Registers) else []

    def wake(self) -> None:
        """Have the loop look at its jobs now."""
        self._device.wake()

    def cancel_all(self) -> None:
        """Give up every job, now and from now on; callable from any thread."""
        self._cancelling = True
        self.wake()

    def stop(self, timeout_s: float) -> bool:
        """End when the jobs are done, seconds; False when the thread had to be left behind with I/O in flight."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        if thread is None:
            self._device.close()
            return True
        self._device.wake()
        thread.join(timeout_s)
        return not thread.is_alive()

    def _submit_some(self, operations: Operations) -> int:
        """Submit as many of these, in order, as depth and bytes in flight allow; returns how many."""
        free = self._device.depth - self._device.in_flight()
        budget = max(self._budget - self._bytes_in_flight, 0)
        count = int(np.searchsorted(np.cumsum(operations["length"][:free]), budget, "right"))
        if not count and not self._bytes_in_flight:
            count = min(1, free)
        if count:
            self._bytes_in_flight += int(operations["length"][:count].sum())
            self._device.submit(operations[:count])
        return count

    def _left(self, operations: Operations) -> None:
        """Book operations that came back."""
        moved = int(operations["length"].sum())
        self._bytes_in_flight -= moved
        self._moved += moved

    def _adapt(self, now_s: float) -> None:
        """Set the bytes in flight by what the medium moved lately."""
        elapsed_s = now_s - self._moved_since_s
        if elapsed_s >= PACE_S:
            wanted = min(max(int(self._moved / elapsed_s * IN_FLIGHT_S), IN_FLIGHT_BYTES_MIN), IN_FLIGHT_BYTES_MAX)
            fall = int((self._budget - wanted) * min(elapsed_s / SLOWER_S, 1.0))
            self._budget = max(wanted, self._budget - fall)
            self._moved, self._moved_since_s = 0, now_s

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self.finish()
        except (StorageError, OSError) as error:
            self._break(f"{self.thread_name}: {error}")
        except Exception as error:  # noqa: BLE001 a defect of ours must not leave callers waiting for ever
            self._break(f"{self.thread_name}: {type(error).__name__}: {error}")
        finally:
            self._device.close()

    def _turn(self) -> bool:
        with self._lock:
            jobs, self._inbox = self._inbox, []
            stopping = self._stopping
        for job in jobs:
            if isinstance(job, Errand):
                job.run(self._device)
            else:
                self.accept(job)
        if self._cancelling:
            self.give_up(Outcome.CANCELLED)
        if not self._device.in_flight():
            self._progress_s = self._moved_since_s = time.monotonic()
            self._moved = 0
        self.send()
        in_flight = self._device.in_flight()
        if not in_flight:
            self.tidy(time.monotonic())
            if stopping and self.idle():
                return False
        quiet = not in_flight and self.idle()
        completions = self._device.reap(max(1, in_flight // WAKE_SHARE), None if quiet else TICK_S)
        now_s = time.monotonic()
        if len(completions) or not in_flight:
            self._progress_s = now_s
            self.complete(completions)
            self._adapt(now_s)
        elif now_s - self._progress_s > self.io_deadline_s:
            self.give_up(Outcome.TIMED_OUT)
        self.tidy(now_s)
        return True

    def _break(self, why: str) -> None:
        """The device is unusable: say so, and answer everything that waits or comes."""
        with self._lock:
            self.broken = why
            jobs, self._inbox = self._inbox, []
        log.error("%s; the store answers nothing more by this loop until it is opened anew", why)
        for job in jobs:
            if isinstance(job, Errand):
                job.fail(why)
            else:
                self.accept(job)
        self.give_up(Outcome.LOST_MEDIUM)
        try:
            while self._device.in_flight():
                self._device.reap(1, TICK_S)
        except (StorageError, MisuseError, OSError):
            _never_freed.append(self)
            return
        self.release_all()
