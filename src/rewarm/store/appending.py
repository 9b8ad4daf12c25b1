"""Where saves go: the writer of one handle, the segment it fills, and the sealing of those that are full.

Used by one write loop, in its thread. A segment is sealed once the last group that writes to it is over: synced first,
then named in the log. One whose sync fails is never sealed, and nothing more is written to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from rewarm.store.layout import PAGE, Kind
from rewarm.store.pool import close_file
from rewarm.store.saving import WriteSide
from rewarm.store.writer import OpenSegment, Writer, is_gone

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a medium says that has no room."""

Synced = Callable[[int], None]
"""Told the result of a sync: 0 or a negative errno."""


class Appender:
    """The open segment of a write loop. `sync` starts an fdatasync of a descriptor."""

    def __init__(self, side: WriteSide, sync: Callable[[int, Synced], None]) -> None:
        self._side = side
        self._sync = sync
        self._open: set[OpenSegment] = set()
        self.writer: Writer | None = None
        self.target: OpenSegment | None = None

    def ensure_writer(self) -> Writer:
        """This handle's writer, made now if there is none. Raises `OSError`."""
        self._leave_removed()
        if self.writer is None:
            self.writer = self._side.new_writer()
        return self.writer

    def target_for(self, length: int, unwritten_bytes: int) -> OpenSegment | None:
        """The open segment, or a new one once the old is full; None when the pool is full. Raises `OSError`.

        `unwritten_bytes` are on their way to the medium, which does not count them yet.
        """
        self._leave_removed()
        if self.target is not None and not (self.target.room_for(length) and self.target.log_has_room()):
            self.seal(self.target)
        if self.target is None and self.writer is not None and self.writer.should_roll():
            self._roll(self.writer)
        if self.target is None:
            self.target = self._open_segment(length, unwritten_bytes)
        return self.target

    def _open_segment(self, length: int, unwritten_bytes: int) -> OpenSegment | None:
        """Room first, then the segment, then a second look: its file tells others of the room that it takes."""
        writer = self.ensure_writer()
        unsealed_bytes = len(self._open) * PAGE  # Each will be named in the log once more.
        need = max(writer.segment_bytes, length) + writer.log_bytes + unwritten_bytes + unsealed_bytes
        if not self._side.make_room(need):
            return None
        try:
            target = self.ensure_writer().new_segment()
        except OSError as error:
            if error.errno not in FULL or not self._side.make_room(writer.segment_bytes, full=True):
                raise
            target = self.ensure_writer().new_segment()
        self._open.add(target)
        if not self._side.make_room(need - PAGE, marks=False):  # Somebody opened one at the same moment.
            target.segment.gone = target.abandoned = True
            os.unlink(target.segment.path)
            self.seal(target)
            return None
        return target

    def _leave_removed(self) -> None:
        """Go on in other files where somebody removed ours or may take us for dead: what is appended there is lost."""
        if self.target is not None and is_gone(self.target.descriptor):
            self.abandon()
        if self.writer is not None and (self.writer.late() or self.writer.removed()):
            self.leave(self.writer)

    def leave(self, writer: Writer) -> None:
        """Append nothing more under this id; go on under a new one. Its files are like those of any other writer."""
        writer.lose()
        if writer is self.writer:
            self.abandon()
            self._start_over()
        self._side.left(writer.id)

    def count(self) -> int:
        """Renew the lease, unless something else has or it is too late; returns log bytes. Raises `OSError`."""
        writer, written = self.writer, 0
        if writer is not None and writer.late():
            self.leave(writer)
        elif writer is not None and writer.should_count():
            written = writer.count()
            writer.drop_old_logs()
            self._side.counters.add(bytes_log=written)
        return written

    def _roll(self, writer: Writer) -> None:
        """Go on in a new log; where that fails, as another writer."""
        writer.drop_old_logs()
        try:
            self._side.make_room(writer.log.offset)  # more than the snapshot takes
            if self.writer is writer:
                written = writer.roll(lambda damage: self._side.snapshot(writer.id, damage))
                self._side.counters.add(bytes_log=written)
        except OSError:
            self._start_over()

    def _start_over(self) -> None:
        """Go on as another writer. The log of one whose segments are all evicted can be removed, a living one's not."""
        writer, self.writer = self.writer, None
        if writer is not None:
            writer.retire()

    def seal(self, target: OpenSegment) -> None:
        """Fill this segment no more, and seal it when its last group is over."""
        if target is self.target:
            self.target = None
        target.full = True
        self._seal_if_quiet(target)

    def abandon(self) -> None:
        """Fill the open segment no more: somebody removed it.

        It is not marked gone: whoever takes its blocks out of the index does that.
        """
        if self.target is not None:
            self.target.abandoned = True
            self.seal(self.target)

    def group_over(self, target: OpenSegment) -> None:
        """A group that wrote to this segment is over."""
        target.groups -= 1
        self._seal_if_quiet(target)

    def flush(self) -> int:
        """Sync segment, log and names; everything saved before is published (a drained command)."""
        if self.target is not None:
            os.fdatasync(self.target.descriptor)
            self.target.unsynced_bytes = 0
        if self.writer is not None:
            os.fdatasync(self.writer.log.descriptor)
            self.writer.sync_names()
        return 0

    def finish(self) -> None:
        """Seal what is open, sync and close the writer."""
        target, self.target = self.target, None
        if target is not None:
            self._announce_seal(target, _sync_now(target.descriptor))
            self._close(target)
        self._start_over()

    def close_files(self) -> None:
        """After a failure: close everything without sealing it."""
        for target in list(self._open):
            self._close(target)
        self.target = None
        self._start_over()

    def _seal_if_quiet(self, target: OpenSegment) -> None:
        if target.full and not target.groups and not target.closing:
            target.closing = True
            if target.abandoned:
                self._close(target)
            else:
                self._sync(target.descriptor, lambda result: self._sealed(target, result))

    def _sealed(self, target: OpenSegment, result: int) -> None:
        """The payload is synced: say so, and sync what the log says of it, which bounds what a power loss costs."""
        self._announce_seal(target, result)
        self._sync(target.writer.log.descriptor, lambda _: self._close(target))

    def _announce_seal(self, target: OpenSegment, result: int) -> None:
        segment = target.segment
        if result >= 0 and not segment.gone and not target.writer.late():
            with contextlib.suppress(OSError):
                written = target.writer.announce(Kind.SEALED, segment.writer, segment.number, target.end)
                self._side.counters.add(bytes_log=written)
                segment.sealed_bytes = target.end

    def _close(self, target: OpenSegment) -> None:
        self._open.discard(target)
        close_file(target.descriptor)
        target.writer.segment_closed()


def _sync_now(descriptor: int) -> int:
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        return -(error.errno or errno.EIO)
    return 0
