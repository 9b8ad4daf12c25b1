"""The poller of a handle: reads what others published, renews the lease, adopts the dead, watches over the loops."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from rewarm.store.eviction import Evictor
from rewarm.store.patience import Mount, Watch
from rewarm.store.saving import Command
from rewarm.store.segments import Segment
from rewarm.store.settings import Settings
from rewarm.store.tailing import Tailer
from rewarm.store.writer import COUNT_SHARE
from rewarm.store.writing import WriteLoop

WATCH_SHARE = 4
"""So many times within the I/O deadline it is looked whether the I/O loops turn."""


class Tender:
    """Runs in a thread of its own, which waits for no call longer than its deadline."""

    def __init__(self, settings: Settings, writes: WriteLoop, mount: Mount, watches: Sequence[Watch]) -> None:
        self._settings = settings
        self._writes = writes
        self._mount = mount
        self._watches = watches
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, tailer: Tailer, evictor: Evictor) -> None:
        """Read what others have published, and begin. Raises `OSError`, and `RuntimeError` without a thread.

        A log that does not answer in time keeps nobody from opening the pool: its writer's host may have died with it
        locked, and its blocks, with those of logs behind it, are misses until the pass is over.
        """
        try:
            self._mount.call(tailer.refresh)
            self._mount.call(evictor.measure)
        except TimeoutError:
            if not tailer.listed:
                raise
        thread = threading.Thread(target=self._run, args=(tailer, evictor), name="rewarm-poll", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """End soon."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end, seconds at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def ended(self) -> bool:
        """True when the thread is not there though nobody has stopped it."""
        return not self._stop.is_set() and (self._thread is None or not self._thread.is_alive())

    def own_segment_evicted(self, segment: Segment) -> None:
        """Somebody removed a segment of ours: if it is the open one, go on in another."""

        def roll() -> int:
            target = self._writes.appender.target
            if target is not None and target.segment is segment:
                self._writes.appender.abandon()
            return 0

        self._writes.put(Command(roll, drained=False))

    def own_writer_adopted(self, writer_id: str) -> None:
        """Somebody took us for dead: go on under a new id."""

        def leave() -> int:
            writer = self._writes.appender.writer
            if writer is not None and writer.id == writer_id:
                self._writes.appender.leave(writer)
            return 0

        self._writes.put(Command(leave, drained=False))

    def _run(self, tailer: Tailer, evictor: Evictor) -> None:
        poll_s = self._settings.poll_s
        turn_s = min(poll_s, self._settings.lease_s / COUNT_SHARE, self._settings.io_deadline_s / WATCH_SHARE)
        next_poll_s = time.monotonic() + poll_s
        while not self._stop.wait(turn_s):
            self._count()
            for watch in self._watches:
                watch.look()
            if time.monotonic() < next_poll_s:
                continue
            # A directory that cannot be listed now is tried again at the next poll; loads report what they meet.
            with contextlib.suppress(OSError):
                self._mount.call(tailer.refresh)
                self._mount.call(evictor.measure_if_cheap)
            next_poll_s = time.monotonic() + poll_s

    def _count(self) -> None:
        """Have the write loop say that this writer lives, where that is due."""
        writer = self._writes.appender.writer
        if writer is not None and (writer.should_count() or writer.late()):
            self._writes.put(Command(self._writes.appender.count, drained=False))
