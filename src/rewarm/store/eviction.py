"""Eviction: drops whole segments, in the write loop's thread, which alone writes to this handle's log."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from rewarm.store import capacity
from rewarm.store.capacity import Victims
from rewarm.store.layout import SEGMENT_GONE, Kind
from rewarm.store.pool import NAMESPACES, FileFacts
from rewarm.store.segments import Segment
from rewarm.store.tailing import Shared, Tailer, remove_segments
from rewarm.store.writer import remove_if_dead
from rewarm.store.writing import WriteLoop

MEASURE_SHARE = 0.01
"""Share of the time that the poller may spend on measuring the pool."""


class Evictor:
    """Measures the pool and makes room in it."""

    def __init__(self, shared: Shared, tailer: Tailer, writes: WriteLoop, *, local: bool) -> None:
        self._shared = shared
        self._tailer = tailer
        self._writes = writes
        self._victims = Victims(shared.pool, shared.segments, tailer.own_writers, local=local)
        self.used_bytes = 0
        self._next_measure_s = 0.0

    def measure(self) -> capacity.Usage:
        """Count real bytes on disk. Raises `OSError`."""
        start_s = time.monotonic()
        usage = capacity.measure(self._shared.pool)
        self.used_bytes = usage.used_bytes
        end_s = time.monotonic()
        self._next_measure_s = end_s + (end_s - start_s) / MEASURE_SHARE
        return usage

    def measure_if_cheap(self) -> None:
        """For the poller: measure unless that was done just now."""
        if time.monotonic() >= self._next_measure_s:
            self.measure()

    def make_room(self, need: int, *, full: bool) -> bool:
        """Evict own and abandoned segments until `need` bytes fit. Raises `OSError`."""
        usage = self.measure()
        if not full:
            need += self._victims.growth_of_others(usage)
        excess = capacity.excess_bytes(self._shared.pool, usage, need)
        if full:
            excess = max(excess, need)
        if excess:
            victims = self._victims.own_or_abandoned(usage)
            files = [file for file, _ in victims]
            if not full and not capacity.could_fit(self._shared.pool, usage, need, files):
                usage = self._measure_without_spent_logs(capacity.PRESSED_LOG_S)
                if not capacity.could_fit(self._shared.pool, usage, need, files):
                    return False
            freed = self._drop(victims, excess)
            usage = self._measure_without_spent_logs()
            if full:
                return freed > 0
        return capacity.fits(self._shared.pool, usage, need)

    def evict_to(self, to_bytes: int) -> int:
        """Drop sealed segments of anybody until at most `to_bytes` are used; returns bytes freed."""
        freed = 0
        usage = self.measure()
        # More than once where need be: the announcements themselves take space in the log.
        while usage.used_bytes > to_bytes:
            step = self._drop(self._victims.any_sealed(usage), usage.used_bytes - to_bytes)
            if not step:
                break
            freed += step
            usage = self._measure_without_spent_logs()
        return freed

    def erase(self) -> int:
        """Remove everything of this handle's namespace; returns bytes freed. Earlier saves are published."""
        self._writes.appender.abandon()
        usage = self.measure()
        writers = self._tailer.writers_of(self._shared.namespace) | self._tailer.own_writers
        freed = self._drop(self._victims.of_writers(usage, writers), usage.used_bytes, even_pinned=True)
        for segment in [s for writer in writers for s in self._shared.segments.of_writer(writer)]:
            remove_segments(self._shared, [segment])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._shared.pool.root / NAMESPACES / f"{self._shared.namespace.hex()}.json")
        self._measure_without_spent_logs()
        return freed

    def announce_drops(self, drops: Sequence[tuple[Segment, int]]) -> int:
        """Name damaged copies in the log; returns how many. Raises `OSError`."""
        if not drops:
            return 0
        writer = self._writes.appender.ensure_writer()
        self._tailer.droppers.add(writer.id)
        self._shared.counters.add(bytes_log=writer.announce_damage(drops))
        return len(drops)

    def _measure_without_spent_logs(self, age_s: float = capacity.SPENT_LOG_S) -> capacity.Usage:
        """Measure again, after removing the logs of dead writers whose segments are all gone: they name nothing.

        A log that says what is damaged is kept, so that nobody has to find out again.
        """
        usage = self.measure()
        logs = self._victims.spent_logs(usage, self._tailer.droppers, age_s)
        for file in logs:
            remove_if_dead(self._shared.pool, file.writer, file.name)
        return self.measure() if logs else usage

    def _drop(self, victims: Sequence[tuple[FileFacts, Segment]], amount: int, *, even_pinned: bool = False) -> int:
        """Announce and unlink victims in order until `amount` bytes are credited."""
        freed = 0
        for file, segment in victims:
            if freed >= amount:
                break
            if not os.access(segment.path.parent, os.W_OK | os.X_OK):
                continue  # It cannot be removed, and goes on being served.
            with self._shared.lock:
                if segment.pins and not even_pinned:
                    continue
                remove_segments(self._shared, [segment])
            # A full disk may refuse the announcement: readers then learn of it by a miss.
            with contextlib.suppress(OSError):
                writer = self._writes.appender.ensure_writer()
                written = writer.announce(Kind.EVICTED, segment.writer, segment.number, SEGMENT_GONE)
                self._shared.counters.add(bytes_log=written)
            try:
                os.unlink(segment.path)
            except OSError:
                continue
            freed += file.bytes_on_disk
            self._shared.counters.add(evicted_segments=1, evicted_bytes=file.bytes_on_disk)
        return freed
