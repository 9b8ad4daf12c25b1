"""Index logs: reading what is new in one, appending to one's own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from rewarm.store import layout
from rewarm.store.buffers import aligned_region
from rewarm.store.layout import FRAME_BYTES_MAX, PAGE, Frame, Kind
from rewarm.store.pool import Pool, close_file

READ_BYTES = 4 * FRAME_BYTES_MAX
"""One read of a log: several of the largest frames, so that a million entries are some twenty reads."""


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

    def rewind(self) -> None:
        """Begin again: files may have come back, or gone."""
        self.offset = self.sequence = 0
        self.skips = []
        self.listed = False


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

    def frames(self, descriptor: int, tail: LogTail) -> Iterator[Frame]:
        """New valid frames as they lie; each is usable until the next is asked for. Advances `tail`. Raises `OSError`.

        A frame is taken whatever its sequence: nothing in a file is rewritten, so one out of order was moved by damage,
        and frames say the same in any order.
        """
        while True:
            count = self._read(descriptor, tail.offset)
            data = self._buffer[:count]
            at = 0
            while (frame := self._next(data, at, tail)) is not None:
                at += frame.bytes_total
                tail.offset += frame.bytes_total
                tail.sequence = max(tail.sequence, frame.sequence)
                yield frame
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


class LogWriter:
    """Appends frames to the log of one writer; used by its write loop only.

    Frames are written one after another at explicit offsets. After a failed write the offset moves on, so that what
    may have reached the medium of the failed frame is never written over.
    """

    def __init__(self, pool: Pool, writer: str, *, direct: bool) -> None:
        self.writer = bytes.fromhex(writer)
        self.path: Path = pool.writers / writer / "00000001.log"
        self.descriptor = pool.create_file(self.path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        self.epoch = 1
        self.offset = 0
        self.frames = 0
        self._sequence = 0
        self._buffer = aligned_region(FRAME_BYTES_MAX)

    def append(
        self, kind: Kind, records: bytes, count: int, *, namespace: bytes = bytes(32), key_bytes: int = 0
    ) -> int:
        """Write one frame; returns its bytes. Raises `OSError` when it did not reach the medium's side whole."""
        self._sequence += 1
        frame = layout.encode_frame(
            kind, self.epoch, self._sequence, self.writer, records, count, namespace=namespace, key_bytes=key_bytes
        )
        at = self.offset
        self.offset += len(frame)
        view = self._buffer.data[: len(frame)]
        view[:] = frame
        written = os.pwritev(self.descriptor, [view], at)
        if written != len(frame):
            raise OSError(errno.ENOSPC, "short write to the index log")
        self.frames += 1
        return len(frame)

    def close(self) -> None:
        """Close the descriptor."""
        close_file(self.descriptor)
