"""Capacity: what a pool takes on disk against what it may take, and which segments go first.

Real bytes on disk are counted over all writers and namespaces, plus a floor of free space on the file system.
Automatic eviction takes this process's own sealed segments and, on a local file system, those of writers whose process
is gone; `evict` and `erase` take what they are told.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Set

import msgspec

from rewarm.store.pool import FileFacts, Pool
from rewarm.store.segments import Segment, SegmentTable
from rewarm.store.writer import log_bytes_for, writer_is_dead

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


def measure(pool: Pool) -> Usage:
    """List every writer's files. Raises `OSError`."""
    files = [file for writer in pool.writer_ids() for file in pool.files(writer)]
    free, total = pool.space()
    return Usage(sum(file.bytes_on_disk for file in files), files, free, total)


def excess_bytes(pool: Pool, usage: Usage, need: int) -> int:
    """Bytes to evict before `need` more may be used: 0 below the high mark, else down to the low mark."""
    capacity = pool.facts.capacity_bytes
    excess = 0
    if usage.used_bytes + need > HIGH_MARK * capacity:
        excess = usage.used_bytes + need - int(LOW_MARK * capacity)
    if usage.free_bytes - need < FREE_FLOOR * usage.total_bytes:
        excess = max(excess, need + int(FREE_FLOOR * usage.total_bytes) - usage.free_bytes)
    return min(excess, usage.used_bytes + need) if excess > 0 else 0


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

    def __init__(self, pool: Pool, table: SegmentTable, own: Set[str], *, local: bool) -> None:
        self._pool = pool
        self._table = table
        self._own = own
        self._local = local

    def own_or_abandoned(self, usage: Usage) -> list[tuple[FileFacts, Segment]]:
        """Sealed segments of this process, and all of writers that are dead on this machine."""
        return self._choose(usage, others_sealed=False)

    def any_sealed(self, usage: Usage) -> list[tuple[FileFacts, Segment]]:
        """Sealed segments of anybody, and all of dead writers."""
        return self._choose(usage, others_sealed=True)

    def of_writers(self, usage: Usage, writers: Iterable[str]) -> list[tuple[FileFacts, Segment]]:
        """Every segment of these writers."""
        wanted = set(writers)
        return self._named(file for file in usage.files if file.is_segment and file.writer in wanted)

    def growth_of_others(self, usage: Usage) -> int:
        """Bytes by which open segments and logs of other living writers may grow: room that is not to be had twice.

        Known on a local file system only, where it can be told who lives.
        """
        logs = {file.writer: file.name for file in usage.files if not file.is_segment}
        newest = {file.writer: file for file in usage.files if file.is_segment and file.writer not in self._own}
        growth = 0
        for file in newest.values() if self._local else ():
            segment_bytes = self._pool.facts.segment_bytes
            is_open = self._table.get(file.writer, file.number).sealed_bytes is None
            if is_open and not self._is_dead(file.writer, logs.get(file.writer)):
                growth += max(segment_bytes - file.bytes_on_disk, 0) + log_bytes_for(segment_bytes)
        return growth

    def spent_logs(self, usage: Usage, kept: Set[str], age_s: float) -> list[FileFacts]:
        """Logs of dead writers that have no segment left and nothing new to say, but for those to be kept."""
        filled = {file.writer for file in usage.files if file.is_segment} | kept
        read_s = time.time() - age_s
        logs = [file for file in usage.files if file.writer not in filled and file.modified_s < read_s]
        return [file for file in logs if self._is_dead(file.writer, file.name)]

    def _choose(self, usage: Usage, *, others_sealed: bool) -> list[tuple[FileFacts, Segment]]:
        logs = {file.writer: file.name for file in usage.files if not file.is_segment}
        dead: dict[str, bool] = {}
        chosen = []
        for file, segment in self._named(file for file in usage.files if file.is_segment):
            take = segment.sealed_bytes is not None and (others_sealed or file.writer in self._own)
            if not take:
                if file.writer not in dead:
                    dead[file.writer] = self._is_dead(file.writer, logs.get(file.writer))
                take = dead[file.writer]
            if take and not segment.pins:
                chosen.append((file, segment))
        return chosen

    def _is_dead(self, writer: str, log_name: str | None) -> bool:
        """True when nobody can append to the writer's files. Without a log they cannot be found, either."""
        return self._local and (log_name is None or writer_is_dead(self._pool, writer, log_name))

    def _named(self, files: Iterable[FileFacts]) -> list[tuple[FileFacts, Segment]]:
        oldest = sorted(files, key=lambda file: (file.modified_s, file.writer, file.number))
        return [(file, self._table.get(file.writer, file.number)) for file in oldest]
