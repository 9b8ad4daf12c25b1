"""Eviction: drops whole segments, in the write loop's thread, which alone writes to this handle's log."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence

from rewarm.store import capacity
from rewarm.store.capacity import Meter, Victims
from rewarm.store.keeping import KEPT_SHARE, Keeper
from rewarm.store.layout import SEGMENT_GONE, Kind
from rewarm.store.leases import Leases
from rewarm.store.pool import NAMESPACES, FileFacts
from rewarm.store.segments import Segment
from rewarm.store.tailing import Shared, Tailer, forget_segments, remove_segments
from rewarm.store.writer import remove_if_dead, remove_log
from rewarm.store.writing import WriteLoop

MEASURE_SHARE = 0.01
"""Share of the time that the poller may spend on measuring the pool."""

ATTEMPTS = 2
"""What others open while this handle evicts is made up for once: after that the room goes to whoever was faster."""

PAUSE_S_MAX = 0.005
"""Longest pause between two victims: several measurements of others, and a fraction of what filling a segment takes."""


class Evictor:
    """Measures the pool and makes room in it."""

    def __init__(self, shared: Shared, tailer: Tailer, writes: WriteLoop, leases: Leases, keeper: Keeper) -> None:
        self._shared = shared
        self._tailer = tailer
        self._writes = writes
        self._leases = leases
        self._keeper = keeper
        self._meter = Meter(shared.pool, shared.segments)
        self._victims = Victims(shared.pool, shared.segments, tailer.own_writers, leases)
        self.used_bytes = 0
        self._next_measure_s = 0.0

    def measure(self, step: Callable[[], None] = lambda: None) -> capacity.Usage:
        """Count real bytes on disk, with a call of `step` for each writer. Raises `OSError`."""
        start_s = time.monotonic()
        usage = self._meter.measure(step)
        self.used_bytes = usage.used_bytes
        end_s = time.monotonic()
        self._next_measure_s = end_s + (end_s - start_s) / MEASURE_SHARE
        return usage

    def measure_if_cheap(self) -> None:
        """For the poller: measure unless that was done just now, and take over the dead."""
        if time.monotonic() >= self._next_measure_s:
            usage = self.measure()
            # Who only reads leaves nothing behind.
            if self._writes.appender.writer is not None:
                self._victims.adopt_dead(usage)

    def _go_on(self) -> None:
        """Between two steps, long ones on a slow medium: the loop turns, and its writer says that it lives."""
        self._writes.turned_s = time.monotonic()
        writer = self._writes.appender.writer
        if writer is not None and writer.should_count() and not writer.late():
            with contextlib.suppress(OSError):
                self._shared.counters.add(bytes_log=writer.count())

    def make_room(self, need: int, *, full: bool, marks: bool) -> bool:
        """Evict segments of anybody until `need` bytes fit. Raises `OSError`."""
        pool, usage = self._shared.pool, self.measure(self._go_on)
        if full:
            # By what was freed: the announcements take space, and so does whatever else is written meanwhile.
            return self._evict(usage, lambda now, freed: freed >= need, again=False) > 0
        pressed = marks and capacity.is_pressed(pool, usage, need)
        dead: dict[str, bool] = {}

        def in_all(now: capacity.Usage) -> int:
            return need + self._victims.growth_of_others(now, dead)

        def enough(now: capacity.Usage, freed: int = 0) -> bool:
            return now.used_bytes <= capacity.target_bytes(pool, now, in_all(now), pressed=pressed)

        if not enough(usage):
            files = [file for file, _ in self._victims.of_anybody(usage)]
            if not capacity.could_fit(pool, usage, in_all(usage), files):
                usage, _ = self._without_spent_logs(capacity.PRESSED_LOG_S)
                if not capacity.could_fit(pool, usage, in_all(usage), files):
                    return False
            for _ in range(ATTEMPTS):
                self._evict(usage, enough, again=True)
                usage, _ = self._without_spent_logs()
                if capacity.fits(pool, usage, in_all(usage)):
                    break
        return capacity.fits(pool, usage, in_all(usage))

    def evict_to(self, to_bytes: int) -> int:
        """Drop segments of anybody until at most `to_bytes` are used; returns bytes freed, those of spent logs too."""
        freed = 0
        usage = self.measure()
        # More than once where need be: the announcements themselves take space in the log.
        while usage.used_bytes > to_bytes:
            step = self._evict(usage, lambda now, freed: now.used_bytes <= to_bytes, again=False)
            usage, logs = self._without_spent_logs()
            freed += step + logs
            if not step:
                break
        return freed

    def erase(self) -> int:
        """Remove everything of this handle's namespace; returns bytes freed. Earlier saves are published."""
        self._writes.appender.abandon()
        usage = self.measure()
        writers = self._tailer.writers_of(self._shared.namespace) | self._tailer.own_writers
        victims = self._victims.of_writers(usage, writers)
        freed = sum(self._drop(usage, file, segment, by_order=True) for file, segment in victims)
        for segment in [s for writer in writers for s in self._shared.segments.of_writer(writer)]:
            remove_segments(self._shared, [segment])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._shared.pool.root / NAMESPACES / f"{self._shared.namespace.hex()}.json")
        _, logs = self._without_spent_logs()
        return freed + logs

    def announce_drops(self, drops: Sequence[tuple[Segment, int]]) -> int:
        """Name damaged copies in the log; returns how many. Raises `OSError`."""
        if not drops:
            return 0
        writer = self._writes.appender.ensure_writer()
        self._tailer.droppers.add(writer.id)
        self._shared.counters.add(bytes_log=writer.announce_damage(drops))
        return len(drops)

    def _without_spent_logs(self, age_s: float = capacity.SPENT_LOG_S) -> tuple[capacity.Usage, int]:
        """Measure again, without the logs of dead writers whose segments are all gone; and the bytes that these took.

        A log that says what is damaged is kept, so that nobody has to find out again.
        """
        usage = self.measure(self._go_on)
        freed = sum(
            self._remove_log(usage, file) for file in self._victims.spent_logs(usage, self._tailer.droppers, age_s)
        )
        return (self.measure(self._go_on), freed) if freed else (usage, 0)

    def _remove_log(self, usage: capacity.Usage, file: FileFacts) -> int:
        logs = capacity.logs_by_writer(usage)[file.writer]
        with contextlib.suppress(OSError):
            if self._leases.local and remove_if_dead(self._shared.pool, file.writer, file.name):
                return file.bytes_on_disk
            if self._leases.adopt(file.writer, logs):
                remove_log(self._shared.pool, file.writer, file.name)
                return file.bytes_on_disk
        return 0

    def _evict(self, usage: capacity.Usage, enough: Callable[[capacity.Usage, int], bool], *, again: bool) -> int:
        """Drop one segment after another, measuring between them, until it is `enough` (of usage and bytes freed).

        Returns bytes freed. With `again` blocks that this process has read since are kept by saving them anew. The
        pause lets those that found the pool full at the same moment see what the others do.
        """
        freed = 0
        present = {(file.writer, file.name) for file in usage.files}
        for file, segment in self._victims.of_anybody(usage):
            if enough(usage, freed):
                break
            if (file.writer, file.name) not in present:
                continue  # Somebody else was faster.
            freed += self._drop(usage, file, segment, again=again)
            self._go_on()
            time.sleep(random.uniform(0, PAUSE_S_MAX))
            usage = self._meter.measure_again(usage, self._tailer.own_writers)
            self.used_bytes = usage.used_bytes
            present = {(file.writer, file.name) for file in usage.files}
        return freed

    def _drop(
        self,
        usage: capacity.Usage,
        file: FileFacts,
        segment: Segment,
        *,
        again: bool = False,
        by_order: bool = False,
    ) -> int:
        """Announce and unlink one segment; returns bytes freed, 0 where somebody else was faster or it has to stay."""
        if not os.access(segment.path.parent, os.W_OK | os.X_OK):
            return 0  # It cannot be removed, and goes on being served.
        if not by_order and not self._victims.may_drop(usage, segment):
            return 0
        kept = self._keeper.read(segment, file.bytes_on_disk // KEPT_SHARE) if again else None
        with self._shared.lock:
            if segment.pins and not by_order:
                return 0
            segment.gone = True
        forget_segments(self._shared, [segment])
        # A full disk may refuse the announcement: readers then learn of it by a miss.
        with contextlib.suppress(OSError):
            writer = self._writes.appender.ensure_writer()
            written = writer.announce(Kind.EVICTED, segment.writer, segment.number, SEGMENT_GONE)
            self._shared.counters.add(bytes_log=written)
        try:
            os.unlink(segment.path)
        except OSError:
            return 0
        if kept:
            self._keeper.save(kept)
        self._shared.counters.add(evicted_segments=1, evicted_bytes=file.bytes_on_disk)
        return file.bytes_on_disk
