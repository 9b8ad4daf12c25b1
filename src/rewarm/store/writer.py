"""A writer: the directory it owns, its log, the segment it appends to. Synchronous; used by one write loop only.

It comes into being with the first save, so that reading leaves nothing behind. It holds an advisory lock on its log for
as long as its process lives: on one machine that tells others whether its unsealed segments may still grow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid

import numpy as np
import numpy.typing as npt

from rewarm.store import layout
from rewarm.store.buffers import aligned_region
from rewarm.store.layout import PAGE, Kind
from rewarm.store.log import LogWriter
from rewarm.store.pool import WRITERS, Pool, open_regular, sync_directory
from rewarm.store.segments import Segment, SegmentTable


class OpenSegment:
    """The segment being filled: where the next payload goes, and how many groups still write to it."""

    def __init__(self, segment: Segment, descriptor: int, limit: int) -> None:
        self.segment = segment
        self.descriptor = descriptor
        self.limit = limit
        self.end = PAGE
        self.groups = 0
        self.unsynced_bytes = 0
        self.full = False

    def room_for(self, count: int) -> bool:
        """True when a payload of `count` bytes fits; an empty segment takes one of any size."""
        return self.end + layout.pages(count) <= self.limit or self.end == PAGE

    def allocate(self, count: int) -> int:
        """Offset of a new payload."""
        at = self.end
        self.end += layout.pages(count)
        return at


class Writer:
    """One writer's directory. Raises `OSError` from everything that touches the medium."""

    def __init__(self, pool: Pool, table: SegmentTable, namespace: bytes, description: str, *, direct: bool) -> None:
        self._pool = pool
        self._table = table
        self._namespace = namespace
        self._direct = direct
        self._numbers = 0
        self.id = uuid.uuid4().hex
        self.segment_bytes = pool.facts.segment_bytes
        self.directory = pool.writers / self.id
        pool.make_directory(pool.root / WRITERS)
        pool.note_namespace(namespace, description)
        pool.make_directory(self.directory)
        self.log = LogWriter(pool, self.id, direct=direct)
        # Held until the process ends, however it ends: see `writer_is_dead`.
        with contextlib.suppress(OSError):
            fcntl.flock(self.log.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = layout.encode_open(pool.pool_id, pool.facts.capacity_bytes, pool.facts.segment_bytes)
        self.log.append(Kind.OPEN, record, 1)
        sync_directory(pool.writers)

    def new_segment(self) -> OpenSegment:
        """Create the next segment with its header."""
        self._numbers += 1
        segment = self._table.get(self.id, self._numbers)
        flags = os.O_RDWR | (os.O_DIRECT if self._direct else 0)
        descriptor = self._pool.create_file(segment.path, flags)
        page = aligned_region(PAGE)
        page.data[:] = layout.encode_segment_header(self._numbers, bytes.fromhex(self.id), self._pool.pool_id)
        try:
            if os.pwritev(descriptor, [page.data], 0) != PAGE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(segment.path)
            raise
        return OpenSegment(segment, descriptor, self._pool.facts.segment_bytes)

    def publish(self, key_bytes: int, entries: npt.NDArray[np.void]) -> int:
        """Write entries with keys of one length as frames; returns log bytes."""
        written = 0
        step = layout.entries_per_frame(key_bytes)
        for start in range(0, len(entries), step):
            part = entries[start : start + step]
            written += self.log.append(
                Kind.ENTRIES, part.tobytes(), len(part), namespace=self._namespace, key_bytes=key_bytes
            )
        return written

    def announce(self, kind: Kind, writer: str, number: int, offset: int) -> int:
        """Write one reference frame; returns log bytes."""
        return self.log.append(kind, layout.encode_reference(bytes.fromhex(writer), number, offset), 1)

    def sync_names(self) -> None:
        """Make the names of the segments survive a power loss."""
        sync_directory(self.directory)

    def close(self) -> None:
        """Close the log; a writer that never stored anything and announced nothing leaves no directory behind."""
        empty = self.log.frames == 1
        self.log.close()
        if empty:
            with contextlib.suppress(OSError):
                os.unlink(self.log.path)
                os.rmdir(self.directory)


def writer_is_dead(pool: Pool, writer: str, log_name: str) -> bool:
    """True when no process of this machine holds the writer's lock. Only meaningful on a local file system."""
    try:
        descriptor = open_regular(pool.writers / writer / log_name, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
