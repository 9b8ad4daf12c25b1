"""Capacity: what a pool takes on disk against what it may take, and which segments go first.

Real bytes on disk are counted over all writers and namespaces, plus a floor of free space on the file system. Anybody's
sealed segments may go, oldest first, and every segment of a writer that is dead; `evict` and `erase` take what they are
told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Set

import msgspec

from rewarm.store.layout import pages
from rewarm.store.leases import Leases
from rewarm.store.pool import FileFacts, Pool
from rewarm.store.segments import Segment, SegmentTable
from rewarm.store.writer import log_bytes_for

HIGH_MARK = 0.95
LOW_MARK = 0.90
SPENT_LOG_S = 600.0
"""A log keeps for so long after its last frame: others that have not polled since must learn what it says is evicted,
or they offer what is gone, and take a save of it for done."""

PRESSED_LOG_S = 30.0
"""The same where a save would be refused for want of room: many polls all the same."""

FREE_FLOOR = 0.02
"""Share of the file system that stays free: nearly full ones get slow, and others live there too."""


class Usage(msgspec.Struct, frozen=True):
    """Bytes on disk of a pool, and what the file system has left."""

    used_bytes: int
    files: list[FileFacts]
    free_bytes: int
    total_bytes: int


class Meter:
    """Measures a pool. Sealed segments do not change any more, and are looked at once."""

    def __init__(self, pool: Pool, table: SegmentTable) -> None:
        self._pool = pool
        self._table = table
        self._settled: dict[str, dict[str, FileFacts]] = {}

    def measure(self, step: Callable[[], None]) -> Usage:
        """List every writer's files, with a call of `step` before each writer's. Raises `OSError`."""
        settled: dict[str, dict[str, FileFacts]] = {}
        files: list[FileFacts] = []
        for writer in self._pool.writer_ids():
            step()
            mine = self._pool.files(writer, self._settled.get(writer))
            settled[writer] = {file.name: file for file in mine if self._is_settled(file)}
            files += mine
        self._settled = settled
        free, total = self._pool.space()
        return Usage(sum(file.bytes_on_disk for file in files), files, free, total)

    def measure_again(self, before: Usage, own: Set[str]) -> Usage:
        """List names anew, and look only at what is new or may have grown of one's `own`. Raises `OSError`.

        A look at a file costs a call: over a network more than all else between two victims. What others have open is
        taken as it was, which counts nothing twice: what it has grown by since was reckoned with as growth to come.
        """
        known: dict[str, dict[str, FileFacts]] = {}
        for file in before.files:
            sealed = file.is_segment and self._table.get(file.writer, file.number).sealed_bytes is not None
            if sealed or file.writer not in own:
                known.setdefault(file.writer, {})[file.name] = file
        files = [file for writer in self._pool.writer_ids() for file in self._pool.files(writer, known.get(writer))]
        return Usage(sum(file.bytes_on_disk for file in files), files, *self._pool.space())

    def _is_settled(self, file: FileFacts) -> bool:
        # What a file system has set aside behind the end of a file, it may still take back.
        exact = file.bytes_on_disk <= pages(file.size)
        return file.is_segment and exact and self._table.get(file.writer, file.number).sealed_bytes is not None


def measure(pool: Pool) -> Usage:
    """List every writer's files. Raises `OSError`."""
    files = [file for writer in pool.writer_ids() for file in pool.files(writer)]
    free, total = pool.space()
    return Usage(sum(file.bytes_on_disk for file in files), files, free, total)


def is_pressed(pool: Pool, usage: Usage, need: int) -> bool:
    """True when `need` more bytes would lie above the high mark: then it is time to evict down to the low one."""
    return usage.used_bytes + need > HIGH_MARK * pool.facts.capacity_bytes


def target_bytes(pool: Pool, usage: Usage, need: int, *, pressed: bool) -> int:
    """Bytes that may stay so that `need` more fit: what is used now where nothing has to go.

    `pressed` is what `is_pressed` said when the eviction began.
    """
    capacity = pool.facts.capacity_bytes
    target = min(usage.used_bytes, capacity - need)
    if pressed:
        target = min(target, int(LOW_MARK * capacity))
    short = need + int(FREE_FLOOR * usage.total_bytes) - usage.free_bytes
    return max(min(target, usage.used_bytes - max(short, 0)), 0)


def fits(pool: Pool, usage: Usage, need: int) -> bool:
    """True when `need` more bytes keep the pool within its capacity and the file system above its floor."""
    return could_fit(pool, usage, need, ())


def could_fit(pool: Pool, usage: Usage, need: int, victims: Iterable[FileFacts]) -> bool:
    """True when `need` more bytes would fit without these files: nothing is dropped for what has no room anyway."""
    freed = sum(file.bytes_on_disk for file in victims)
    return (
        usage.used_bytes - freed + need <= pool.facts.capacity_bytes
        and usage.free_bytes + freed - need >= FREE_FLOOR * usage.total_bytes
    )


class Victims:
    """Chooses segments to drop, oldest first by the server's time of last write."""

    def __init__(self, pool: Pool, table: SegmentTable, own: Set[str], leases: Leases) -> None:
        self._pool = pool
        self._table = table
        self._own = own
        self._leases = leases

    def of_anybody(self, usage: Usage) -> list[tuple[FileFacts, Segment]]:
        """Sealed segments of anybody, what was announced as evicted and left, and all segments of dead writers."""
        logs = logs_by_writer(usage)
        dead: dict[str, bool] = {}
        chosen = []
        for file, segment in self._named(file for file in usage.files if file.is_segment):
            take = segment.sealed_bytes is not None or segment.gone
            if not take:
                if file.writer not in dead:
                    dead[file.writer] = self._leases.is_dead(file.writer, logs.get(file.writer, ()))
                take = dead[file.writer]
            if take and not segment.pins:
                chosen.append((file, segment))
        return chosen

    def of_writers(self, usage: Usage, writers: Iterable[str]) -> list[tuple[FileFacts, Segment]]:
        """Every segment of these writers."""
        wanted = set(writers)
        return self._named(file for file in usage.files if file.is_segment and file.writer in wanted)

    def may_drop(self, usage: Usage, segment: Segment) -> bool:
        """True for a segment that nobody appends to; a dead writer is adopted first, so that nobody will."""
        if segment.sealed_bytes is not None or segment.gone or segment.writer in self._own:
            return True
        return self._leases.adopt(segment.writer, logs_by_writer(usage).get(segment.writer, ()))

    def adopt_dead(self, usage: Usage) -> None:
        """Take over every dead writer that has a segment which is not sealed: whoever comes later need not watch it."""
        logs = logs_by_writer(usage)
        for writer in {
            file.writer
            for file, segment in self._named(f for f in usage.files if f.is_segment)
            if segment.sealed_bytes is None and not segment.gone
        }:
            if writer not in self._own and self._leases.is_dead(writer, logs.get(writer, ())):
                self._leases.adopt(writer, logs.get(writer, ()))

    def growth_of_others(self, usage: Usage, dead: dict[str, bool]) -> int:
        """Bytes by which open segments and logs of other living writers may grow: room that is not to be had twice.

        `dead` keeps what was found out about each writer, for the next time.
        """
        logs = logs_by_writer(usage)
        newest = {file.writer: file for file in usage.files if file.is_segment and file.writer not in self._own}
        growth = 0
        for file in newest.values():
            segment_bytes = self._pool.facts.segment_bytes
            is_open = self._table.get(file.writer, file.number).sealed_bytes is None
            if is_open and file.writer not in dead:
                dead[file.writer] = self._leases.is_dead(file.writer, logs.get(file.writer, ()))
            if is_open and not dead[file.writer]:
                growth += max(segment_bytes - file.bytes_on_disk, 0) + log_bytes_for(segment_bytes)
        return growth

    def spent_logs(self, usage: Usage, kept: Set[str], age_s: float) -> list[FileFacts]:
        """Logs of dead writers that have no segment left and nothing new to say, but for those to be kept."""
        filled = {file.writer for file in usage.files if file.is_segment} | kept
        read_s = time.time() - age_s
        spent = [file for file in usage.files if file.writer not in filled and file.modified_s < read_s]
        logs = logs_by_writer(usage)
        return [file for file in spent if self._leases.is_dead(file.writer, logs[file.writer])]

    def _named(self, files: Iterable[FileFacts]) -> list[tuple[FileFacts, Segment]]:
        oldest = sorted(files, key=lambda file: (file.modified_s, file.writer, file.number))
        return [(file, self._table.get(file.writer, file.number)) for file in oldest]


def logs_by_writer(usage: Usage) -> dict[str, list[str]]:
    """Names of the logs of each writer, in order."""
    logs: dict[str, list[str]] = {}
    for file in usage.files:
        if not file.is_segment:
            logs.setdefault(file.writer, []).append(file.name)
    return logs
