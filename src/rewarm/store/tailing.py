"""Tailing: what other writers published becomes visible here.

Each pass lists the writers, reads every other writer's log past the known offset and applies the frames to the index.
A damaged or vanished log costs its own entries only; it never raises to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from rewarm.store.doubts import Doubts
from rewarm.store.index import Index
from rewarm.store.layout import SEGMENT_GONE, Frame, Kind, entry_mask
from rewarm.store.log import AdoptedEnd, LogReader, LogTail, log_name
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
    io_deadline_s: float


PASS_S = 1.0
"""Who asks whether a writer is dead waits so long for a pass under way: one that takes longer may hang on that log."""


class Tailer:
    """Applies other writers' logs to the index; `refresh` may be called from any thread."""

    def __init__(self, shared: Shared, on_own_eviction: Callable[[Segment], None], on_adoption: Callable[[str], None]):
        self._shared = shared
        self._on_own_eviction = on_own_eviction
        self._on_adoption = on_adoption
        self._tails: dict[str, LogTail] = {}
        self._reader = LogReader()
        self._lock = threading.Lock()
        self._suspects: set[tuple[str, int]] = set()
        self.doubts = Doubts(shared.io_deadline_s)
        self.own_writers: set[str] = set()
        self.droppers: set[str] = set()
        """Writers whose logs name damage."""
        self.unreadable_logs = 0
        self.listed = False  # a pass has seen who is there

    def refresh(self) -> None:
        """Read everything new once. I/O errors leave a log for the next pass, and are counted. Raises `OSError`."""
        with self._locked(self._shared.io_deadline_s):
            own = self._own_with_blocks()  # before the listing: one that comes into being meanwhile is not in it
            present = self._shared.pool.writer_ids()
            self.listed = True
            for writer in (set(self._tails) | own) - set(present):
                self._forget_writer(self._tails.setdefault(writer, LogTail(writer)))
            self._suspects |= self.doubts.due()
            while self._suspects:
                writer, number = self._suspects.pop()
                if writer in present:
                    tail = self._tails.setdefault(writer, LogTail(writer))
                    tail.missing.add(number)
                    tail.changed_ns = 0
            tails = [self._tails.setdefault(writer, LogTail(writer)) for writer in present]
            # What did not answer the last time comes last: everything behind it waits as long as the mount lets it.
            for tail in sorted(tails, key=lambda tail: tail.unreadable):
                if tail.writer in self.own_writers:
                    self._look_after_own(tail)
                else:
                    self._read(tail)
            self.unreadable_logs = sum(tail.unreadable for tail in tails)

    def _own_with_blocks(self) -> set[str]:
        """This handle's own writers that have published something, whether a pass has met them or not."""
        table = self._shared.segments
        return {writer for writer in set(self.own_writers) if any(one.indexed for one in table.of_writer(writer))}

    @contextlib.contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        """One pass at a time; a pass that hangs on a dead mount does not take others along for ever."""
        if not self._lock.acquire(timeout=wait_s):
            raise TimeoutError(errno.ETIMEDOUT, "the file system does not answer")
        try:
            yield
        finally:
            self._lock.release()

    def restart(self) -> None:
        """Read every log from its beginning at the next pass. Raises `OSError`."""
        with self._locked(self._shared.io_deadline_s):
            for tail in self._tails.values():
                tail.rewind()

    def suspect(self, segment: Segment) -> None:
        """A segment was not found: look for it at the next pass."""
        self._suspects.add((segment.writer, segment.number))

    def writers_of(self, namespace: bytes) -> set[str]:
        """Other writers known to serve a namespace. Raises `OSError`."""
        with self._locked(self._shared.io_deadline_s):
            return {tail.writer for tail in self._tails.values() if tail.namespace == namespace}

    def lacks_own_files(self) -> bool:
        """True while a segment of this handle's own writers cannot be found."""
        return any(self._tails[writer].missing for writer in self.own_writers & set(self._tails))

    def silent(self, writer: str, lease_s: float) -> bool:
        """True when a log has not changed for a lease of this process's own time. Raises `OSError`.

        It is read now if the last look is as long ago, but not where the last look failed: saves wait for this answer,
        and a read that hangs would hold them up. The lease is the one that the log names, else `lease_s`.
        """
        tail = self._tails.get(writer)
        if tail is not None and not tail.adopted and (tail.unreadable or not self._is_silent(tail, lease_s)):
            return False
        with self._locked(PASS_S):
            tail = self._tails.setdefault(writer, LogTail(writer))
            return tail.adopted or (
                self._is_silent(tail, lease_s) and self._read(tail) and self._is_silent(tail, lease_s)
            )

    def adopt(self, writer: str, lease_s: float | None) -> bool:
        """Take a dead writer's files over: from now on nothing that it appends counts. Raises `OSError`.

        With a lease the log is read once more, and a writer that has written meanwhile is left alone. True when the
        writer is adopted, by whomever: of two who try, the marker of the first stays.
        """
        with self._locked(PASS_S):
            tail = self._tails.setdefault(writer, LogTail(writer))
            if tail.unreadable or not self._read(tail) or (lease_s is not None and not self._is_silent(tail, lease_s)):
                return False
            if not tail.adopted:
                end = AdoptedEnd(tail.epoch, tail.offset)
                self._shared.pool.adopt(writer, msgspec.json.encode(end))
                self._see_marker(tail)
            return tail.adopted

    def _is_silent(self, tail: LogTail, lease_s: float) -> bool:
        return time.monotonic() - tail.seen_s >= (tail.lease_s or lease_s)

    def _read(self, tail: LogTail) -> bool:
        """Read what is new of a writer, in as many logs as there are; False where that failed."""
        try:
            while not self._at_end(tail) and self._read_log(tail):
                pass
            tail.unreadable = False
        except OSError:
            self._shared.files.forget(self._path(tail))  # A file of a mount that has died is dead for ever.
            tail.unreadable = True
        return not tail.unreadable

    def _at_end(self, tail: LogTail) -> bool:
        """True when nothing can follow: the writer was adopted, and what counts was read."""
        return tail.end == tail.position and tail.listed and not tail.missing

    def _read_log(self, tail: LogTail) -> bool:
        """Read on in one log. True when it goes on in another, or must be read again. Raises `OSError`."""
        if tail.rolled_to:
            return self._follow(tail)
        if not tail.sequence and tail.epoch not in self._logs(tail):
            return self._list_again(tail)
        path = self._path(tail)
        try:
            descriptor = self._shared.files.acquire(path)
        except FileNotFoundError:
            return self._list_again(tail)
        start = tail.position
        try:
            for frame in self._reader.frames(descriptor, tail, lambda: self._see_marker(tail)):
                self._apply(frame, tail)
        finally:
            self._shared.files.release(path)
            self._shared.counters.add(bytes_log=self._reader.take_bytes())
            if tail.position != start:
                tail.seen_s = time.monotonic()
        if tail.rolled_to:
            return self._follow(tail)
        if (
            tail.end is not None and tail.offset and tail.position > tail.end
        ):  # What was taken of a late writer goes again.
            tail.go_on_in(min(self._logs(tail), default=1))
            return True
        self._replace(tail)
        return self._look_for_segments(tail)

    def _path(self, tail: LogTail) -> Path:
        return self._shared.pool.writers / tail.writer / log_name(tail.epoch)

    def _logs(self, tail: LogTail) -> list[int]:
        return self._shared.pool.names(tail.writer).logs

    def _list_again(self, tail: LogTail) -> bool:
        """The log is not there: begin with the first that is."""
        logs = self._logs(tail)
        return bool(logs) and logs[0] != tail.epoch and self._move(tail, logs[0])

    def _follow(self, tail: LogTail) -> bool:
        """Go on in the next log once it can be seen, or in the first that is left where that one is gone, too."""
        logs = self._logs(tail)
        if tail.rolled_to in logs:
            return self._move(tail, tail.rolled_to)
        return bool(logs) and logs[0] > tail.epoch and self._move(tail, logs[0])

    def _move(self, tail: LogTail, epoch: int) -> bool:
        self._shared.files.forget(self._path(tail))
        tail.go_on_in(epoch)
        return True

    def _replace(self, tail: LogTail) -> None:
        """A log was read that replaces all that its writer had: forget what it does not name."""
        if tail.kept is None:
            return
        with self._shared.lock:
            slots = [segment.slot for segment in self._shared.segments.of_writer(tail.writer) if segment.indexed]
            kept_slots, kept_offsets = (
                np.concatenate([part[i] for part in tail.kept]) if tail.kept else np.zeros(0) for i in (0, 1)
            )
            self._shared.index.keep_places(slots, kept_slots.astype(np.int64), kept_offsets.astype(np.uint64))
        tail.kept = None

    def _see_marker(self, tail: LogTail) -> None:
        """Look whether the writer was adopted. A log is read first, and this is done before what was read is taken."""
        if tail.adopted or not self._shared.pool.is_adopted(tail.writer):
            return
        tail.adopted = True
        with contextlib.suppress(OSError, msgspec.DecodeError):  # A marker that says no end: the whole log counts.
            marker = msgspec.json.decode(self._shared.pool.adoption(tail.writer), type=AdoptedEnd)
            tail.end = (marker.log, marker.end)

    def _apply(self, frame: Frame, tail: LogTail) -> None:
        if frame.kind == Kind.ENTRIES:
            tail.namespace = frame.namespace
            if frame.namespace == self._shared.namespace:
                self._add_entries(frame, tail)
            return
        if frame.kind == Kind.COUNTER:
            tail.take_lease(frame.lease_s())
            return
        if frame.kind == Kind.ROLLED:
            (owner, number, _), *_ = frame.references() or [(b"", 0, 0)]
            tail.rolled_to = number if owner.hex() == tail.writer and number > tail.epoch else 0
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
            if tail.kept is not None:
                tail.kept.append((slots, entries["offset"].copy()))
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
        with self._shared.lock:
            known = self._shared.segments.of_writer(tail.writer)
        if not self._note_missing(tail, known):
            return False
        tail.rewind()
        return True

    def _look_after_own(self, tail: LogTail) -> None:
        """Notice that files of one's own are gone, come back, or were adopted."""
        with self._shared.lock:
            known = [segment for segment in self._shared.segments.of_writer(tail.writer) if segment.indexed]
        with contextlib.suppress(OSError):
            if self._note_missing(tail, known):
                tail.rewind()
                while self._read_log(tail):
                    pass
            if tail.adopted:
                self._on_adoption(tail.writer)

    def _note_missing(self, tail: LogTail, known: list[Segment]) -> bool:
        """Compare segments with the names that are there, where those have changed; True when one has come back."""
        changed_ns = os.stat(self._shared.pool.writers / tail.writer).st_mtime_ns
        if tail.names_are_known(changed_ns):
            return False
        names = self._shared.pool.names(tail.writer)
        tail.note_listing(changed_ns)
        back = tail.missing & names.segments
        if back:
            tail.missing -= back
            return True
        missing = [segment for segment in known if segment.number not in names.segments]
        forget_segments(self._shared, missing)
        tail.missing |= {segment.number for segment in missing}
        tail.missing -= {number for number in tail.missing if self._shared.segments.get(tail.writer, number).gone}
        tail.listed = True
        self._see_marker(tail)
        return False

    def _forget_writer(self, tail: LogTail) -> None:
        """Its directory is not there. One's own may come back with the mount, and its log is not read otherwise."""
        known = [segment for segment in self._shared.segments.of_writer(tail.writer) if segment.indexed]
        forget_segments(self._shared, known)
        if tail.writer in self.own_writers:
            tail.missing |= {segment.number for segment in known}
            tail.changed_ns = 0
            return
        self._shared.files.forget(self._path(tail))
        del self._tails[tail.writer]


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
    """Take segments out of the index, and close their files; of those that are gone only the name is kept."""
    with shared.lock:
        indexed = [segment for segment in segments if segment.indexed]
        if indexed:
            shared.index.remove_segments([segment.slot for segment in indexed])
        for segment in indexed:
            segment.indexed = False
        for segment in segments:
            if segment.gone:
                shared.segments.bury(segment)
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
