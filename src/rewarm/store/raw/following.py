"""The log of a raw pool as one handle follows it: which blocks are where, and the open device that says so.

One object per opened device. After the device has gone and come back its handle makes another one, which begins with an
empty index; what the former one still waits for disturbs nobody.
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np

from rewarm.store.index import Index
from rewarm.store.layout import Frame, Kind
from rewarm.store.raw.header import Header
from rewarm.store.raw.media import Media
from rewarm.store.raw.slots import LogTail, SlotTable


class Follower:
    """Index and slots of a pool on an open device; `name` stands for the device in the cache of descriptors."""

    def __init__(self, media: Media, header: Header, namespace: bytes, name: Path) -> None:
        self.media = media
        self.name = name
        self.lock = threading.RLock()
        """Guards index and table. Not held while the medium is asked."""
        self.index = Index()
        self.table = SlotTable(header)
        self._namespace = namespace
        self._header = header
        self._fresh: Index | None = None
        self._tailing = threading.Lock()
        self._tail = LogTail(media, header.pool_id, self._take_frame, self._begin)

    @property
    def header(self) -> Header:
        """The header that was read last."""
        return self._tail.header or self._header

    def take_read_bytes(self) -> int:
        """Bytes of header and log read since this was asked last."""
        with self.lock:
            count, self._tail.read_bytes = self._tail.read_bytes, 0
        return count

    def catch_up(self) -> None:
        """Read what was published since the last time. Raises `OSError`, within the medium's deadline."""
        if not self._tailing.acquire(timeout=self.media.deadline_s):
            raise TimeoutError(errno.ETIMEDOUT, "the log is still being read")
        try:
            self._tail.refresh()
        finally:
            with self.lock:
                if self._fresh is not None:
                    self.index, self._fresh = self._fresh, None
            self._tailing.release()

    def generation(self, slot: int) -> int:
        """The last use of a slot that is known."""
        with self.lock:
            return self.table.generations.get(slot, 0)

    def forget(self, key: bytes, slot: int, offset: int) -> None:
        """Take one copy of a key out of the index."""
        with self.lock:
            self.index.remove_copy(key, slot, offset)

    def _begin(self, header: Header) -> None:
        """Another log half counts: what it says replaces everything, at once for whoever looks keys up."""
        with self.lock:
            self.table = SlotTable(header)
            self._fresh = Index()

    def _take_frame(self, frame: Frame) -> None:
        with self.lock:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        index = self.index if self._fresh is None else self._fresh
        gone = self.table.apply(frame)
        if gone:
            index.remove_segments(gone)
        if frame.kind == Kind.DROPPED:
            for slot in self.table.used.values():
                index.remove_places(slot.number, [self._header.slot_offset(slot.number) + at for at in slot.dropped])
        if frame.kind != Kind.ENTRIES or frame.namespace != self._namespace:
            return
        entries = self.table.taken
        if not len(entries):
            return
        starts = self._header.slot_offset(0) + entries["segment"].astype(np.uint64) * self._header.slot_bytes
        offsets = starts + entries["offset"]
        slots = entries["segment"].astype(np.int64)
        index.add(entries["key"].tolist(), slots, offsets, entries["length"], entries["checksum"])
