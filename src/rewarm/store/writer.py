"""A writer: the directory it owns, its log, the segment it appends to. Synchronous; used by one write loop only.

It comes into being with the first save, so that reading leaves nothing behind. Every frame renews its lease; others
take it for dead when its log has not changed for that long, and it takes itself for late when half of it has passed.
It also holds a lock on its log for as long as its process lives: on one machine a free lock tells others at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.store import layout
from rewarm.store.buffers import aligned_region
from rewarm.store.compaction import Snapshot
from rewarm.store.layout import PAGE, Kind
from rewarm.store.log import LogWriter, now_s
from rewarm.store.pool import ADOPTED, WRITERS, Pool, close_file, open_regular, sync_directory
from rewarm.store.segments import Segment, SegmentTable
from rewarm.store.tailing import Shared

MAKE_ATTEMPTS = 3
"""Somebody who removes the logs of the dead can take the newest for one of them, for a moment."""

LOG_SHARE = 4
"""A quarter of a segment is set aside for what the log says meanwhile: a block of a page takes as much there."""

LATE_SHARE = 2
"""A writer stops half a lease before others take it for dead: what it has begun by then has as long to arrive."""

COUNT_SHARE = 6
"""So many times within its lease a writer says that it lives, when it has nothing else to say."""

ROLL_GROWTH = 2
"""A log is rolled when it is so many times as long as what the last one began with: compaction costs as much again."""

LOCK_ATTEMPTS = 100
LOCK_PAUSE_S = 0.01
"""Who asks whether a writer is dead lets go of its lock at once; a second is ample."""


def log_bytes_for(segment_bytes: int) -> int:
    """How much a log may grow while one segment is filled."""
    return segment_bytes // LOG_SHARE


class Manner(msgspec.Struct, frozen=True):
    """How a writer writes: with O_DIRECT or not, with a sync before a frame counts or not, under which lease."""

    direct: bool
    sync: bool
    lease_s: float
    log_keep_s: float


class OpenSegment:
    """The segment being filled: where the next payload goes, and how many groups still write to it."""

    def __init__(self, writer: Writer, segment: Segment, descriptor: int) -> None:
        self.writer = writer
        self.segment = segment
        self.descriptor = descriptor
        self.limit = writer.segment_bytes
        self.log_end = writer.log.offset + writer.log_bytes
        self.end = PAGE
        self.groups = 0
        self.unsynced_bytes = 0
        self.full = False
        self.abandoned = False
        self.closing = False

    def room_for(self, count: int) -> bool:
        """True when a payload of `count` bytes fits; an empty segment takes one of any size."""
        return self.end + layout.pages(count) <= self.limit or self.end == PAGE

    def log_has_room(self) -> bool:
        """True while the log has grown by no more than what was reckoned with when this segment was opened."""
        return self.writer.log.offset <= self.log_end

    def allocate(self, count: int) -> int:
        """Offset of a new payload."""
        at = self.end
        self.end += layout.pages(count)
        return at


class Writer:
    """One writer's directory. Raises `OSError` from everything that touches the medium."""

    def __init__(
        self, writer_id: str, pool: Pool, table: SegmentTable, namespace: bytes, description: str, manner: Manner
    ) -> None:
        self._pool = pool
        self._table = table
        self._namespace = namespace
        self._manner = manner
        self._lost = False
        self._epochs = 1
        self._old_logs: list[tuple[LogWriter, float]] = []
        self._snapshot_bytes = 0
        self._damage: list[tuple[Segment, int]] = []
        self._numbers = 0
        self._has_said = False  # anything but that it lives
        self._open_segments = 0
        self._retired = False
        self.id = writer_id
        self.segment_bytes = pool.facts.segment_bytes
        self.log_bytes = log_bytes_for(self.segment_bytes)
        self.directory = pool.writers / self.id
        pool.make_directory(pool.root / WRITERS)
        pool.note_namespace(namespace, description)
        pool.make_directory(self.directory)
        try:
            self.log = LogWriter(pool, self.id, direct=manner.direct, sync=manner.sync)
        except OSError:
            self._remove_directory()
            raise
        try:
            _lock(self.log.descriptor)
            if self.removed():
                raise FileNotFoundError(errno.ENOENT, "the new log was taken for a dead writer's, and removed")
            self._begin_log(self.log)
            sync_directory(pool.writers)
            sync_directory(pool.root)
        except OSError:
            self.close()
            raise

    def new_segment(self) -> OpenSegment:
        """Create the next segment with its header."""
        self._numbers += 1
        segment = self._table.get(self.id, self._numbers)
        flags = os.O_RDWR | (os.O_DIRECT if self._manner.direct else 0)
        descriptor = self._pool.create_file(segment.path, flags)
        page = aligned_region(PAGE)
        page.data[:] = layout.encode_segment_header(self._numbers, bytes.fromhex(self.id), self._pool.pool_id)
        try:
            if os.pwritev(descriptor, [page.data], 0) != PAGE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            close_file(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(segment.path)
            raise
        self._open_segments += 1
        return OpenSegment(self, segment, descriptor)

    def count(self) -> int:
        """Say that this writer lives, and for how long that holds; returns log bytes."""
        return self.log.append(Kind.COUNTER, layout.encode_counter(self._manner.lease_s), 1)

    def _begin_log(self, log: LogWriter) -> None:
        facts = self._pool.facts
        log.append(Kind.OPEN, layout.encode_open(self._pool.pool_id, facts.capacity_bytes, facts.segment_bytes), 1)
        log.append(Kind.COUNTER, layout.encode_counter(self._manner.lease_s), 1)

    def should_roll(self) -> bool:
        """True when the log is longer than a segment, and than twice what it must say."""
        return self.log.offset > max(self.segment_bytes, ROLL_GROWTH * self._snapshot_bytes)

    def roll(self, take: Callable[[list[tuple[Segment, int]]], Snapshot]) -> int:
        """Go on in a new log; returns its bytes. It is complete and synced before the old one says so.

        Raises `OSError` where that fails: the old log goes on then.
        """
        snapshot = take(self._damage)
        self._epochs += 1
        manner = self._manner
        log = LogWriter(
            self._pool, self.id, direct=manner.direct, sync=False, epoch=self._epochs, sequence=self.log.sequence
        )
        try:
            _lock(log.descriptor)
            self._begin_log(log)
            for key_bytes, entries in snapshot.entries:
                self._append_entries(log, key_bytes, entries)
            for number, size in snapshot.sealed:
                log.append(Kind.SEALED, layout.encode_reference(bytes.fromhex(self.id), number, size), 1)
            self._append_damage(log, snapshot.damage)
            os.fdatasync(log.descriptor)
            self.sync_names()
            self.log.append(Kind.ROLLED, layout.encode_reference(bytes.fromhex(self.id), log.epoch, log.offset), 1)
        except OSError:
            log.close()
            with contextlib.suppress(OSError):
                os.unlink(log.path)
            raise
        # Before the new log says anything: after a power loss nobody looks into it who does not find this.
        with contextlib.suppress(OSError):
            os.fdatasync(self.log.descriptor)
        log.sync = manner.sync
        log.signed_s = self.log.signed_s
        self._old_logs.append((self.log, time.monotonic()))
        self.log, self._snapshot_bytes, self._damage = log, log.offset, list(snapshot.damage)
        return log.offset

    def drop_old_logs(self) -> None:
        """Remove logs that everybody who polls has read."""
        while self._old_logs and time.monotonic() - self._old_logs[0][1] >= self._manner.log_keep_s:
            log, _ = self._old_logs.pop(0)
            with contextlib.suppress(OSError):
                os.unlink(log.path)
            log.close()

    def should_count(self) -> bool:
        """True when it has said nothing for a while."""
        return now_s() - self.log.signed_s >= self._manner.lease_s / COUNT_SHARE

    def late(self) -> bool:
        """True when others may soon take this writer for dead, or have: nothing more may be published under its id."""
        return self._lost or now_s() - self.log.signed_s >= self._manner.lease_s / LATE_SHARE

    def lose(self) -> None:
        """Others have taken this writer for dead."""
        self._lost = True

    def publish(self, key_bytes: int, entries: npt.NDArray[np.void]) -> int:
        """Write entries with keys of one length as frames; returns log bytes."""
        self._has_said = True
        return self._append_entries(self.log, key_bytes, entries)

    def _append_entries(self, log: LogWriter, key_bytes: int, entries: npt.NDArray[np.void]) -> int:
        written = 0
        step = layout.entries_per_frame(key_bytes)
        for start in range(0, len(entries), step):
            part = entries[start : start + step]
            written += log.append(
                Kind.ENTRIES, part.tobytes(), len(part), namespace=self._namespace, key_bytes=key_bytes
            )
        return written

    def announce(self, kind: Kind, writer: str, number: int, offset: int) -> int:
        """Write one reference frame; returns log bytes."""
        self._has_said = True
        return self.log.append(kind, layout.encode_reference(bytes.fromhex(writer), number, offset), 1)

    def announce_damage(self, damage: Sequence[tuple[Segment, int]]) -> int:
        """Name damaged places, as many in a frame as it holds; returns log bytes."""
        self._has_said = True
        self._damage += damage
        return self._append_damage(self.log, damage)

    def _append_damage(self, log: LogWriter, damage: Sequence[tuple[Segment, int]]) -> int:
        written = 0
        for start in range(0, len(damage), layout.REFERENCES_PER_FRAME):
            part = damage[start : start + layout.REFERENCES_PER_FRAME]
            records = [layout.encode_reference(bytes.fromhex(one.writer), one.number, at) for one, at in part]
            written += log.append(Kind.DROPPED, b"".join(records), len(part))
        return written

    def sync_names(self) -> None:
        """Make the names of the segments survive a power loss."""
        sync_directory(self.directory)

    def segment_closed(self) -> None:
        """A segment of this writer will not be named in the log again."""
        self._open_segments -= 1
        if self._retired and not self._open_segments:
            self.close()

    def retire(self) -> None:
        """Open no segment any more; the log is closed with the last one that is open."""
        self._retired = True
        if not self._open_segments:
            self.close()

    def removed(self) -> bool:
        """True when somebody removed the log, or its mount has died: what it says is lost."""
        return is_gone(self.log.descriptor)

    def close(self) -> None:
        """Sync and close the log and all names; a writer that stored and announced nothing leaves no directory.

        Nor a segment: without a log nobody could tell for a whole lease that it has stopped growing.
        """
        empty = not self._has_said
        if not empty:
            with contextlib.suppress(OSError):
                os.fdatasync(self.log.descriptor)
                self.sync_names()
        for log in (self.log, *(log for log, _ in self._old_logs)):
            log.close()
        if empty:
            for path in (*(self._table.get(self.id, i + 1).path for i in range(self._numbers)), self.log.path):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            self._remove_directory()

    def _remove_directory(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)


def is_gone(descriptor: int) -> bool:
    """True when a file was removed, or does not answer because its mount has died: what it holds is lost to others."""
    try:
        return not os.fstat(descriptor).st_nlink
    except OSError:
        return True


def make_writer(shared: Shared, own: set[str], description: str, manner: Manner) -> Writer:
    """A writer under a new id, which is in `own` before its files can be seen. Raises `OSError`."""
    attempts = 0
    while True:
        attempts += 1
        writer_id = uuid.uuid4().hex
        own.add(writer_id)
        try:
            return Writer(writer_id, shared.pool, shared.segments, shared.namespace, description, manner)
        except FileNotFoundError:
            if attempts == MAKE_ATTEMPTS:
                raise


def _lock(descriptor: int) -> None:
    """Lock a log for as long as the process lives, however it ends: see `writer_is_dead`, which may hold it briefly.

    Raises `OSError` where somebody else keeps it: the writer would look dead to everybody while it lives.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempts == LOCK_ATTEMPTS:
                raise
            time.sleep(LOCK_PAUSE_S)
        except OSError:  # a file system without locks; nobody takes its writers for dead
            return


def writer_is_dead(pool: Pool, writer: str, log_name: str) -> bool:
    """True when no process of this machine holds the writer's lock. Only meaningful on a local file system."""
    with _dead_log(pool, writer, log_name) as dead:
        return dead


def remove_if_dead(pool: Pool, writer: str, log_name: str) -> bool:
    """Remove the log of a dead writer, and its directory if nothing else is in it; True when it is gone.

    Local file systems only.

    The lock is held meanwhile: a writer that is just coming into being waits for it, and then finds its log gone.
    """
    with _dead_log(pool, writer, log_name) as dead, contextlib.suppress(OSError):
        if dead:
            remove_log(pool, writer, log_name)
            return True
    return False


def remove_log(pool: Pool, writer: str, name: str) -> None:
    """Remove a log that names nothing any more, and with the last one the marker and the directory. Raises `OSError`.

    The marker goes last: until then nobody takes what a late writer appends.
    """
    folder = pool.writers / writer
    os.unlink(folder / name)
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [ADOPTED]:
            os.unlink(folder / ADOPTED)
        os.rmdir(folder)


@contextlib.contextmanager
def _dead_log(pool: Pool, writer: str, log_name: str) -> Iterator[bool]:
    """Holds the lock of a log where nobody else does, and says whether it could."""
    try:
        descriptor = open_regular(pool.writers / writer / log_name, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dead = True
        except OSError:
            dead = False
        yield dead
    finally:
        close_file(descriptor)
