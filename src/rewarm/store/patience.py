"""Bounded waits for a file system that may never answer.

A call into a dead mount hangs, and nothing ends it. So the calls of a handle run in a thread of their own, and whoever
asks waits for its deadline and gets an error; the call itself, and the thread, are left behind. The same for the I/O
loops: blocks that wait for a loop which does not turn get their verdict from outside, and keep their memory borrowed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from rewarm.store.contract import Outcome
from rewarm.store.loop import Errand, fulfil
from rewarm.store.transfer import BatchTransfer

T = TypeVar("T")


def wait_for(future: Future[T], deadline_s: float, alive_s: Callable[[], float] = lambda: 0.0) -> T:
    """The result of a future; `TimeoutError` when nothing was heard for so long, by `alive_s` (monotonic) neither."""
    start_s = time.monotonic()
    while not future.done():
        left_s = max(start_s, alive_s()) + deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, f"the file system has not answered for {deadline_s:g} s")
        with contextlib.suppress(TimeoutError):
            future.exception(left_s)
    return future.result()


class Mount:
    """Runs calls of one handle one after another in a daemon thread that starts with the first."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[tuple[Future[int], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = False

    def call(
        self, action: Callable[[], T], *, deadline_s: float | None = None, alive_s: Callable[[], float] = lambda: 0.0
    ) -> T:
        """The result of an action, or its exception; `TimeoutError` (an `OSError`) when it takes too long."""
        found: list[T] = []
        future = self.later(lambda: found.append(action()))
        try:
            wait_for(future, self._deadline_s if deadline_s is None else deadline_s, alive_s)
        except TimeoutError:
            future.cancel()  # Where it has not begun it never will.
            raise
        return found[0]

    def later(self, action: Callable[[], object]) -> Future[int]:
        """Run an action when those before it are over."""
        future: Future[int] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="rewarm-mount", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the limit on threads
                    raise OSError(errno.EAGAIN, str(error)) from error
                self._thread = thread
            self._calls.put((future, action))
            if self._ended:
                self._calls.put(None)
                self._thread = None
        return future

    def end(self) -> None:
        """Let the thread end once nothing is left."""
        with self._lock:
            self._ended = True
            if self._thread is not None:
                self._calls.put(None)
                self._thread = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, action = call
            if future.set_running_or_notify_cancel():
                fulfil(future, functools.partial(_done, action))


def _done(action: Callable[[], object]) -> int:
    action()
    return 0


class Turning(Protocol):
    """What does errands while it lives: a loop."""

    def put(self, job: Errand) -> bool:
        """Hand an errand over; False when it will not be done."""


class Watch:
    """The transfers of one loop, and whether it turns. `add` and `overdue` from any thread, the rest from one."""

    def __init__(self, loop: Turning, deadline_s: float) -> None:
        self._loop = loop
        self._deadline_s = deadline_s
        self._waiting: deque[weakref.ref[BatchTransfer]] = deque()
        self._errand: Errand | None = None
        self._asked_s = 0.0

    def add(self, transfer: BatchTransfer) -> None:
        """Watch over a transfer."""
        self._waiting.append(weakref.ref(transfer))

    def overdue(self) -> bool:
        """True when the loop was asked for a sign of life, and has not given one in time."""
        errand = self._errand
        return errand is not None and not errand.future.done() and time.monotonic() - self._asked_s > self._deadline_s

    def look(self) -> None:
        """Ask the loop for a sign of life while anything waits; without one in time give verdicts in its place."""
        while self._waiting and self._is_over(self._waiting[0]):
            self._waiting.popleft()
        if self._errand is not None and self._errand.future.done():
            self._errand = None
        if not self._waiting:
            return
        if self._errand is None:
            self._errand, self._asked_s = Errand(lambda device: 0), time.monotonic()
            if not self._loop.put(self._errand):
                self._errand = None
        elif time.monotonic() - self._asked_s > self._deadline_s:
            for _ in range(len(self._waiting)):
                transfer = self._waiting.popleft()()
                if transfer is not None:
                    transfer.settle(transfer.pending(), Outcome.TIMED_OUT)

    def _is_over(self, entry: weakref.ref[BatchTransfer]) -> bool:
        transfer = entry()
        return transfer is None or transfer.done()
