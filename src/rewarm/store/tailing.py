"""Tailing: what other writers published becomes visible here.

Each pass lists the writers, reads every other writer's log past the known offset and applies the frames to the index.
A damaged or vanished log costs its own entries only; it never raises to the caller.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from rewarm.store.index import Index
from rewarm.store.layout import SEGMENT_GONE, Frame, Kind, entry_mask
from rewarm.store.log import LogReader, LogTail
from rewarm.store.pool import Pool
from rewarm.store.segments import FileCache, Segment, SegmentTable
from rewarm.store.transfer import Counters


class Shared(Protocol):
    """What the parts of one open file store share."""

    pool: Pool
    namespace: bytes
    index: Index
    segments: SegmentTable
    files: FileCache
    lock: threading.RLock
    counters: Counters


class Tailer:
    """Applies other writers' logs to the index; `refresh` may be called from any thread."""

    def __init__(self, shared: Shared, on_own_eviction: Callable[[Segment], None]) -> None:
        self._shared = shared
        self._on_own_eviction = on_own_eviction
        self._tails: dict[str, LogTail] = {}
        self._reader = LogReader()
        self._lock = threading.Lock()
        self._suspects: set[tuple[str, int]] = set()
        self.own_writers: set[str] = set()
        self.droppers: set[str] = set()
        """Writers whose logs name damage."""
        self.unreadable_logs = 0

    def refresh(self) -> None:
        """Read everything new once. I/O errors leave a log for the next pass, and are counted."""
        with self._lock:
            present = self._shared.pool.writer_ids()
            for writer in set(self._tails) - set(present):
                self._forget_writer(writer)
            while self._suspects:
                writer, number = self._suspects.pop()
                if tail := self._tails.get(writer):
                    tail.missing.add(number)
                    tail.changed_ns = 0
            unreadable = 0
            for writer in present:
                if writer not in self.own_writers:
                    unreadable += not self._read(self._tails.setdefault(writer, LogTail(writer)))
            self.unreadable_logs = unreadable

    def restart(self) -> None:
        """Read every log from its beginning at the next pass."""
        with self._lock:
            for tail in self._tails.values():
                tail.rewind()

    def suspect(self, segment: Segment) -> None:
        """A segment was not found: look for it at the next pass."""
        self._suspects.add((segment.writer, segment.number))

    def writers_of(self, namespace: bytes) -> set[str]:
        """Other writers known to serve a namespace."""
        with self._lock:
            return {tail.writer for tail in self._tails.values() if tail.namespace == namespace}

    def _read(self, tail: LogTail) -> bool:
        path = self._shared.pool.writers / tail.writer / f"{tail.epoch:08d}.log"
        try:
            descriptor = self._shared.files.acquire(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            more = True
            while more:
                for frame in self._reader.frames(descriptor, tail):
                    self._apply(frame, tail)
                more = self._look_for_segments(tail)
        except OSError:
            return False
        finally:
            self._shared.files.release(path)
            self._shared.counters.add(bytes_log=self._reader.take_bytes())
        return True

    def _apply(self, frame: Frame, tail: LogTail) -> None:
        if frame.kind == Kind.ENTRIES:
            tail.namespace = frame.namespace
            if frame.namespace == self._shared.namespace:
                self._add_entries(frame, tail)
            return
        if frame.kind not in (Kind.SEALED, Kind.EVICTED, Kind.DROPPED):
            return
        with self._shared.lock:
            named = [
                (self._shared.segments.get(owner.hex(), number), offset) for owner, number, offset in frame.references()
            ]
            if frame.kind == Kind.DROPPED:
                self.droppers.add(tail.writer)
                drop_places(self._shared, named)
                return
            for segment, offset in named:
                self._apply_reference(Kind(frame.kind), tail.writer, segment, offset)

    def _apply_reference(self, kind: Kind, writer: str, segment: Segment, offset: int) -> None:
        if kind == Kind.SEALED:
            if segment.writer == writer:
                segment.sealed_bytes = offset
        elif offset == SEGMENT_GONE and not segment.gone:
            own = segment.writer in self.own_writers
            remove_segments(self._shared, [segment])
            if own:
                self._on_own_eviction(segment)

    def _add_entries(self, frame: Frame, tail: LogTail) -> None:
        """Take the entries of one frame of this namespace."""
        entries = frame.entries()
        mask = entry_mask(entries)
        numbers, place = np.unique(entries["segment"], return_inverse=True)
        with self._shared.lock:
            known = [self._shared.segments.get(tail.writer, number) for number in numbers.tolist()]
            for i, segment in enumerate(known):
                segment.indexed = True
                if segment.gone or segment.number in tail.missing:
                    mask &= place != i
                if segment.sealed_bytes is not None:
                    mask &= (place != i) | (entries["offset"] + entries["length"] <= segment.sealed_bytes)
                if segment.dropped:
                    mask &= ~((place == i) & np.isin(entries["offset"], np.array(list(segment.dropped), np.uint64)))
            slots = np.array([segment.slot for segment in known], np.int64)[place]
            if not mask.all():
                entries, slots = entries[mask], slots[mask]
            self._shared.index.add(
                entries["key"].tolist(), slots, entries["offset"], entries["length"], entries["checksum"]
            )

    def _look_for_segments(self, tail: LogTail) -> bool:
        """Forget segments that are not there. True when one has come back, so that the log must be read again.

        Looked for after the log was read, never before: a segment that it names was made before it named it. Again only
        when the directory has changed. A mount in trouble can claim that files are gone which come back later.
        """
        if not tail.sequence or (tail.listed and not tail.missing):
            return False
        changed_ns = os.stat(self._shared.pool.writers / tail.writer).st_mtime_ns
        if tail.listed and changed_ns == tail.changed_ns:
            return False
        present = {file.number for file in self._shared.pool.files(tail.writer) if file.is_segment}
        tail.changed_ns = changed_ns
        back = tail.missing & present
        if back:
            tail.missing -= back
            tail.rewind()
            return True
        with self._shared.lock:
            missing = [s for s in self._shared.segments.of_writer(tail.writer) if s.number not in present]
            forget_segments(self._shared, missing)
        tail.missing = {segment.number for segment in missing}
        tail.listed = True
        return False

    def _forget_writer(self, writer: str) -> None:
        forget_segments(self._shared, self._shared.segments.of_writer(writer))
        self._shared.files.forget(self._shared.pool.writers / writer / f"{self._tails[writer].epoch:08d}.log")
        del self._tails[writer]


def drop_places(shared: Shared, damage: Iterable[tuple[Segment, int]]) -> None:
    """Forget what lies at these places, now and in what is read later. Called with the store's lock held."""
    by_segment: dict[Segment, list[int]] = {}
    for segment, offset in damage:
        by_segment.setdefault(segment, []).append(offset)
    for segment, offsets in by_segment.items():
        segment.dropped |= set(offsets)
        if segment.indexed:
            shared.index.remove_places(segment.slot, offsets)


def forget_segments(shared: Shared, segments: list[Segment]) -> None:
    """Take segments out of the index, and close their files."""
    with shared.lock:
        indexed = [segment for segment in segments if segment.indexed]
        if indexed:
            shared.index.remove_segments([segment.slot for segment in indexed])
        for segment in indexed:
            segment.indexed = False
    for segment in segments:
        shared.files.forget(segment.path)


def remove_segments(shared: Shared, segments: list[Segment]) -> None:
    """Forget segments for good: names are never used again, so nothing said of them later counts."""
    with shared.lock:
        for segment in segments:
            segment.gone = True
    forget_segments(shared, segments)


def read_flags(direct: bool) -> int:
    """Flags with which segments and logs are opened for reading."""
    return os.O_RDONLY | (os.O_DIRECT if direct else 0)
