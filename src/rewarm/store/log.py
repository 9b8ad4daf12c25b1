"""Index logs: reading what is new in one, appending to one's own, going on in another."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.store import layout
from rewarm.store.buffers import aligned_region
from rewarm.store.layout import FRAME_BYTES_MAX, PAGE, Frame, Kind
from rewarm.store.pool import Pool, close_file

READ_BYTES = 4 * FRAME_BYTES_MAX
"""One read of a log: several of the largest frames, so that a million entries are some twenty reads."""

TICK_S = 2.0
"""The coarsest times of a file system: of two changes within this the second may not show in them."""

LEASE_S_MAX = 86400.0
"""No writer can ask to be waited for longer than a day."""

Position = tuple[int, int]
"""(number of a log, byte offset in it)."""


class AdoptedEnd(msgspec.Struct, frozen=True):
    """Content of the marker of adoption: the dead writer's frames count up to this place, whatever follows it."""

    log: int
    end: int


class LogTail:
    """How far one writer's log was read; `skips` are the spans, first byte and end, that held no frame."""

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self.epoch = 1
        self.offset = 0
        self.sequence = 0
        self.skips: list[tuple[int, int]] = []
        self.namespace: bytes | None = None
        self.listed = False
        self.missing: set[int] = set()
        self.changed_ns = 0
        """When its directory was last changed, by the server's clock; 0 to list it again in any case."""
        self._changed_seen_s = 0.0
        self._settled = False
        self.seen_s = time.monotonic()
        """When this process last saw something new in it, by its own clock."""
        self.lease_s: float | None = None
        self.unreadable = False
        """The last attempt to read it failed, or took longer than the mount allows."""
        self.adopted = False
        self.end: Position | None = None
        self.rolled_to = 0
        self.kept: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]] | None = None
        """While a log is read that replaces all entries of its writer: (slots, offsets) of those that it has."""

    @property
    def position(self) -> Position:
        """Where the next frame is expected."""
        return self.epoch, self.offset

    def take_lease(self, lease_s: float | None) -> None:
        """What the log says of its writer's lease."""
        self.lease_s = min(lease_s, LEASE_S_MAX) if lease_s else None

    def rewind(self) -> None:
        """Begin again: files may have come back, or gone."""
        self.offset = self.sequence = self.rolled_to = 0
        self.skips = []
        self.listed = False

    def go_on_in(self, epoch: int) -> None:
        """Go on at the beginning of another log, whose entries replace all that this writer had."""
        self.rewind()
        self.epoch = epoch
        self.kept = []

    def names_are_known(self, changed_ns: int) -> bool:
        """True when nothing has changed since the directory was listed; `changed_ns` as its server says it now."""
        return self.listed and self._settled and changed_ns == self.changed_ns

    def note_listing(self, changed_ns: int) -> None:
        """The names were listed. A change soon after the last one may not show in the time, so they are once more."""
        now_s = time.monotonic()
        if changed_ns != self.changed_ns:
            self.changed_ns, self._changed_seen_s = changed_ns, now_s
        self._settled = now_s - self._changed_seen_s >= TICK_S

    def may_take(self, frame: Frame) -> bool:
        """False for what was appended after the writer had been adopted."""
        return self.end is None or (self.epoch, self.offset + frame.bytes_total) <= self.end


class LogReader:
    """Reads frames past a tail's position (format-1, section 5.2). One buffer, one thread at a time."""

    def __init__(self) -> None:
        self._buffer = aligned_region(READ_BYTES).data
        self._bytes = 0

    def take_bytes(self) -> int:
        """Bytes read since the last call."""
        count, self._bytes = self._bytes, 0
        return count

    def _read(self, descriptor: int, at: int) -> int:
        count = os.preadv(descriptor, [self._buffer], at)
        self._bytes += count
        return count

    def frames(self, descriptor: int, tail: LogTail, before: Callable[[], None] = lambda: None) -> Iterator[Frame]:
        """New valid frames as they lie; each is usable until the next is asked for. Advances `tail`. Raises `OSError`.

        A frame is taken whatever its sequence: nothing in a file is rewritten, so one out of order was moved by damage,
        and frames say the same in any order. `before` is called when frames were read, before any of them is taken.
        """
        while True:
            count = self._read(descriptor, tail.offset)
            data = self._buffer[:count]
            at = 0
            frame = self._next(data, at, tail)
            if frame is not None:
                before()
            while frame is not None:
                if not tail.may_take(frame):
                    return
                at += frame.bytes_total
                tail.offset += frame.bytes_total
                tail.sequence = max(tail.sequence, frame.sequence)
                yield frame
                if tail.rolled_to:
                    return
                frame = self._next(data, at, tail)
            if at:
                continue
            if count < PAGE or not self._skip_damage(descriptor, tail):
                return

    def _next(self, data: memoryview, at: int, tail: LogTail) -> Frame | None:
        frame = layout.decode_frame(data, at)
        if frame and frame.writer == bytes.fromhex(tail.writer) and frame.epoch == tail.epoch:
            return frame
        return None

    def _skip_damage(self, descriptor: int, tail: LogTail) -> bool:
        """Move the tail to the first later page with a valid frame; False where there is none."""
        start = tail.offset + PAGE
        while True:
            start = _next_data(descriptor, start)
            if start < 0:
                return False
            count = self._read(descriptor, start)
            data = self._buffer[:count]
            for at in layout.magic_pages(data):
                if self._next(data, at, tail):
                    tail.skips.append((tail.offset, start + at))
                    tail.offset = start + at
                    return True
            if count < READ_BYTES:
                return False
            # A frame may straddle two reads: step back by the largest one, never to where this read began.
            start += count - FRAME_BYTES_MAX + PAGE


def _next_data(descriptor: int, at: int) -> int:
    """The page at or behind `at` where a file has data, -1 where it has none: holes can have any size."""
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA) // PAGE * PAGE
    except OSError as error:  # ENXIO: behind the last data; else a file system that cannot tell
        return -1 if error.errno == errno.ENXIO else at


def log_name(epoch: int) -> str:
    """File name of a log."""
    return f"{epoch:08d}.log"


class LogWriter:
    """Appends frames to one log of one writer; used by its write loop only.

    Frames are written one after another at explicit offsets, never with O_APPEND. After a failed write the offset moves
    on, so that what may have reached the medium of the failed frame is never written over. With `sync` each frame is
    synced before it counts, for media that acknowledge from a cache.
    """

    def __init__(
        self, pool: Pool, writer: str, *, direct: bool, sync: bool = False, epoch: int = 1, sequence: int = 0
    ) -> None:
        self.writer = bytes.fromhex(writer)
        self.path: Path = pool.writers / writer / log_name(epoch)
        self.descriptor = pool.create_file(self.path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        self.epoch = epoch
        self.offset = 0
        self.sequence = sequence
        self.signed_s = 0.0
        """When the last frame that arrived was begun (`now_s`)."""
        self.sync = sync
        self._buffer = aligned_region(FRAME_BYTES_MAX)

    def append(
        self, kind: Kind, records: bytes, count: int, *, namespace: bytes = bytes(32), key_bytes: int = 0
    ) -> int:
        """Write one frame; returns its bytes. Raises `OSError` when it did not reach the medium's side whole."""
        self.sequence += 1
        frame = layout.encode_frame(
            kind, self.epoch, self.sequence, self.writer, records, count, namespace=namespace, key_bytes=key_bytes
        )
        at = self.offset
        self.offset += len(frame)
        view = self._buffer.data[: len(frame)]
        view[:] = frame
        begun_s = now_s()
        written = os.pwritev(self.descriptor, [view], at)
        if written != len(frame):
            raise OSError(errno.ENOSPC, "short write to the index log")
        if self.sync:
            os.fdatasync(self.descriptor)
        self.signed_s = begun_s
        return len(frame)

    def close(self) -> None:
        """Close the descriptor."""
        close_file(self.descriptor)


def now_s() -> float:
    """Seconds of a clock that goes on while the machine sleeps: a writer that slept is late, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
