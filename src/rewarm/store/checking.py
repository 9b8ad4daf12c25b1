"""`check` and `inspect`: reads every log and verifies every block of a pool, whoever wrote it.

What a killed process leaves behind (a torn last frame, payload that was never published) is a note: it costs a little
space until eviction and is never served. What loses blocks, or opens them to others, is a finding. What is not
understood, of another version or not of this format, is named and left alone. Memory stays within a few MiB, whatever
lengths a log claims.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from rewarm.store import housekeeping
from rewarm.store.buffers import aligned_region
from rewarm.store.capacity import SPENT_LOG_S
from rewarm.store.contract import CheckReport, Finding
from rewarm.store.hosts import attachment_notes
from rewarm.store.layout import (
    BLOCK_BYTES_MAX,
    PAGE,
    SEGMENT_GONE,
    Kind,
    entry_mask,
    is_other_version,
    overlaps,
    pages,
    segment_header_is,
)
from rewarm.store.log import AdoptedEnd, LogReader, LogTail, Position
from rewarm.store.mounts import mount_notes
from rewarm.store.pool import (
    FileFacts,
    Pool,
    close_file,
    open_regular,
)
from rewarm.store.tailing import read_flags
from rewarm.store.writer import remove_if_dead, writer_is_dead

Place = tuple[str, int]
"""A segment: writer id and number."""

Damage = tuple[str, int, int]
"""A damaged copy: writer id, segment number, offset."""

LOG = 0
"""No segment has this number: a drop that names it says that damage of the log at this offset is known."""


class WriterView(msgspec.Struct):
    """What one writer's log says."""

    writer: str
    namespace: bytes = b""
    blocks: int = 0
    log_bytes: int = 0
    skips: list[tuple[int, int]] = []
    torn_tail: bool = False
    unreadable: bool = False
    alive: bool = False
    foreign: bool = False
    names_damage: bool = False
    adopted: bool = False
    end: Position | None = None
    counters: int = 0
    lease_s: float | None = None
    logs: list[FileFacts] = []
    entries: dict[int, list[npt.NDArray[np.void]]] = {}


class PoolView(msgspec.Struct):
    """Everything the logs of a pool say, and the files that are there."""

    writers: list[WriterView]
    files: dict[Place, FileFacts]
    sealed: dict[Place, int]
    evicted: set[Place]
    dropped: set[Damage]
    unreadable: list[Finding]


READ_BYTES = 1 << 20
"""Read and summed up at a time: a log may claim blocks of 1 GiB."""

FIXABLE = ("damaged_block", "damaged_log", "impossible_entry", "overlapping_entry")
"""What a drop takes care of: the damage is known from then on, and the next save of a lost block writes it anew."""


def read_pool(pool: Pool, *, direct: bool, local: bool) -> PoolView:
    """Read every log once."""
    view = PoolView([], {}, {}, set(), set(), [])
    reader = LogReader()
    for writer in sorted(pool.writer_ids()):
        files = pool.files(writer)
        logs = [file for file in files if not file.is_segment]
        one = WriterView(writer, logs=logs, skips=[], entries={})
        with contextlib.suppress(OSError, msgspec.DecodeError):
            one.adopted = pool.is_adopted(writer)
            if one.adopted:
                marker = msgspec.json.decode(pool.adoption(writer), type=AdoptedEnd)
                one.end = (marker.log, marker.end)
        lock_free = local and not (logs and not writer_is_dead(pool, writer, logs[0].name))
        one.alive = not one.adopted and not lock_free
        for file in logs:
            _read_log(pool, file, reader, one, view, direct)
        view.writers.append(one)
        # Listed again after the log was read: a segment that it names was made before it named it.
        view.files |= {(writer, file.number): file for file in pool.files(writer) if file.is_segment}
    return view


def _read_log(pool: Pool, file: FileFacts, reader: LogReader, one: WriterView, view: PoolView, direct: bool) -> None:
    tail = LogTail(file.writer)
    tail.epoch, tail.end = file.number, one.end
    path = pool.writers / file.writer / file.name
    try:
        descriptor = open_regular(path, read_flags(direct))
    except OSError as error:
        one.unreadable = True
        view.unreadable.append(Finding("unreadable_log", _inside(pool, path), error.strerror or str(error)))
        return
    try:
        one.foreign |= _first_page_is_foreign(descriptor)
        for frame in reader.frames(descriptor, tail):
            one.names_damage |= frame.kind == Kind.DROPPED
            if frame.kind == Kind.COUNTER:
                one.counters += 1
                one.lease_s = frame.lease_s()
            if frame.kind == Kind.ENTRIES:
                one.namespace = frame.namespace
                entries = frame.entries().copy()
                one.blocks += len(entries)
                for number in np.unique(entries["segment"]).tolist():
                    one.entries.setdefault(number, []).append(entries[entries["segment"] == number])
            elif frame.kind == Kind.ROLLED:  # The log that follows replaces all that this one names.
                one.entries, one.blocks = {}, 0
            elif frame.kind in (Kind.SEALED, Kind.EVICTED, Kind.DROPPED):
                _note_references(view, Kind(frame.kind), frame.references())
    except OSError as error:
        one.unreadable = True
        view.unreadable.append(Finding("unreadable_log", _inside(pool, path), error.strerror or str(error)))
    finally:
        close_file(descriptor)
    one.log_bytes += file.size
    one.skips += tail.skips
    one.torn_tail |= tail.offset < file.size and one.end is None


def _first_page_is_foreign(descriptor: int) -> bool:
    """True where a file says that it is of another version of this format."""
    page = aligned_region(PAGE).data
    return is_other_version(page[: os.preadv(descriptor, [page], 0)])


def _note_references(view: PoolView, kind: Kind, references: Iterable[tuple[bytes, int, int]]) -> None:
    for owner, number, offset in references:
        place = (owner.hex(), number)
        if kind == Kind.SEALED:
            view.sealed[place] = offset
        elif kind == Kind.EVICTED and offset == SEGMENT_GONE:
            view.evicted.add(place)
        elif kind == Kind.DROPPED:
            view.dropped.add((*place, offset))


def check_pool(
    pool: Pool,
    *,
    direct: bool,
    local: bool,
    drop: Callable[[list[Damage]], None] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> CheckReport:
    """Verify a pool; with `drop`, name what is damaged there and remove what nobody can need. Raises `OSError`.

    `progress` is told bytes of payload as they are read.
    """
    view = read_pool(pool, direct=direct, local=local)
    check = _Check(pool, view, direct, progress)
    for one in view.writers:
        check.writer(one)
    check.missing_segments()
    check.tree(fix=drop is not None)
    if drop and check.damage:
        drop(check.damage)
    if drop:
        check.remove_orphans()
    fixed = [msgspec.structs.replace(f, fixed=True) if drop and f.kind in FIXABLE else f for f in check.findings]
    findings = [*view.unreadable, *fixed]
    return CheckReport(all(f.fixed for f in findings), findings, check.notes, check.blocks, check.bytes_verified)


class _Check:
    """One run over a pool."""

    def __init__(self, pool: Pool, view: PoolView, direct: bool, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._pool = pool
        self._view = view
        self._direct = direct
        self._buffer = aligned_region(READ_BYTES)
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []
        self.damage: list[Damage] = []
        self.orphans: list[Path] = []
        self.spent: list[FileFacts] = []
        self._overlapping: set[int] = set()
        self._summed: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.blocks = 0
        self.bytes_verified = 0

    def writer(self, one: WriterView) -> None:
        """Verify one writer's log and segments."""
        where = f"writers/{one.writer}"
        for start, end in one.skips:
            found = Finding("damaged_log", f"{where}@{start}", f"{end - start} bytes of the log are not frames")
            if (one.writer, LOG, start) in self._view.dropped:
                self.notes.append(found)
            else:
                self.findings.append(found)
                self.damage.append((one.writer, LOG, start))
        if one.foreign:
            self.notes.append(Finding("foreign_version", where, "its log is of another version; left alone"))
        elif one.torn_tail and not one.alive:
            self.notes.append(Finding("torn_tail", where, "the writer ended while it wrote its last frame"))
        segments = [(place, file) for place, file in self._view.files.items() if place[0] == one.writer]
        for place, file in segments:
            self._segment(place, file, one)
        if not segments:
            self._without_segments(one, where)

    def _without_segments(self, one: WriterView, where: str) -> None:
        """A dead writer with nothing left names nothing, unless it names damage of others or is news to somebody."""
        if one.alive or one.foreign or one.unreadable or one.names_damage or one.skips:
            return
        if any(file.modified_s > time.time() - SPENT_LOG_S for file in one.logs):
            return
        self.notes.append(Finding("spent_writer", where, "its process is gone, and all of its segments are"))
        if one.logs:
            self.spent += one.logs
        else:
            self.orphans.append(self._pool.writers / one.writer)

    def _segment(self, place: Place, file: FileFacts, one: WriterView) -> None:
        path = self._pool.writers / place[0] / file.name
        where = _inside(self._pool, path)
        if place in self._view.evicted:
            self.notes.append(Finding("evicted_left", where, "announced as evicted and still there"))
            self.orphans.append(path)
            return
        try:
            descriptor = open_regular(path, read_flags(self._direct))
        except FileNotFoundError:
            return
        except OSError as error:
            self.findings.append(Finding("unreadable_segment", where, error.strerror or str(error)))
            return
        try:
            self._opened_segment(descriptor, place, path, one)
        except OSError as error:
            self.findings.append(Finding("unreadable_segment", where, error.strerror or str(error)))
        finally:
            close_file(descriptor)

    def _opened_segment(self, descriptor: int, place: Place, path: Path, one: WriterView) -> None:
        where, batches = _inside(self._pool, path), one.entries.get(place[1], [])
        page = aligned_region(PAGE).data
        head = page[: os.preadv(descriptor, [page], 0)]
        if one.foreign or is_other_version(head):
            self.notes.append(Finding("foreign_version", where, "of another version, as is its log; left alone"))
            return
        whole = segment_header_is(head, place[1], bytes.fromhex(place[0]))
        if not batches and not one.alive and not one.unreadable and (whole or not any(head)):
            self.notes.append(Finding("orphan_segment", where, "no published block lies in it, and its writer is gone"))
            self.orphans.append(path)
            return
        if not whole:
            self.notes.append(Finding("damaged_header", where, "the first page is not this segment's header"))
        size, sealed = os.fstat(descriptor).st_size, self._view.sealed.get(place, 0)
        if size < sealed:
            self.notes.append(Finding("short_segment", where, f"sealed with {sealed} bytes, and has {size}"))
        size = min(size, max(self._pool.facts.segment_bytes, PAGE + BLOCK_BYTES_MAX))  # no honest one is larger
        self._overlapping = self._overlaps(place, where, batches) if batches else set()
        self._summed.clear()
        for entries in batches:
            self._entries(descriptor, place, where, entries, size)

    def _overlaps(self, place: Place, where: str, batches: list[npt.NDArray[np.void]]) -> set[int]:
        """Offsets of entries that share bytes: no writer of ours makes them, and only one of them can be right."""
        offsets = np.concatenate([entries["offset"][entry_mask(entries)] for entries in batches])
        lengths = np.concatenate([entries["length"][entry_mask(entries)] for entries in batches])
        found = set(overlaps(offsets, lengths).tolist())
        for offset in sorted(found):
            if (*place, offset) not in self._view.dropped:
                self.findings.append(Finding("overlapping_entry", f"{where}@{offset}", "shares bytes with another"))
                self.damage.append((*place, offset))
        return found

    def _entries(self, descriptor: int, place: Place, where: str, entries: npt.NDArray[np.void], size: int) -> None:
        good = entry_mask(entries)
        for entry, allowed in zip(entries, good.tolist(), strict=True):
            offset, length = int(entry["offset"]), int(entry["length"])
            if (*place, offset) in self._view.dropped or offset in self._overlapping:
                continue
            if not allowed:
                self.findings.append(Finding("impossible_entry", where, f"offset {offset}, length {length}"))
                self.damage.append((*place, offset))
                continue
            try:
                there, found = min(length, max(size - offset, 0)), b""
                if there == length:
                    there, found = self._sum(descriptor, offset, length)
            except OSError as error:
                self.findings.append(Finding("unreadable_block", f"{where}@{offset}", error.strerror or str(error)))
                continue
            if there == length and found == entry["checksum"].tobytes():
                self.blocks += 1
                self.bytes_verified += length
                continue
            what = "checksum differs" if there == length else f"only {there} of {length} bytes"
            self.findings.append(Finding("damaged_block", f"{where}@{offset}", what))
            self.damage.append((*place, offset))

    def _sum(self, descriptor: int, offset: int, length: int) -> tuple[int, bytes]:
        """Bytes that are there of a block, and their checksum; each place of a segment is read once."""
        if (offset, length) in self._summed:
            return self._summed[offset, length]
        checksum, at = xxhash.xxh3_128(), 0
        while at < length:
            want = min(length - at, READ_BYTES)
            count = min(os.preadv(descriptor, [self._buffer.data[: pages(want)]], offset + at), want)
            checksum.update(self._buffer.data[:count])
            self._progress(count)
            at += count
            if count < want:
                break
        self._summed[offset, length] = at, checksum.digest()
        return self._summed[offset, length]

    def missing_segments(self) -> None:
        """Segments that a log names, that nobody announced as evicted, and that are not there."""
        for one in self._view.writers:
            for number, batches in one.entries.items():
                place = (one.writer, number)
                if place not in self._view.files and place not in self._view.evicted:
                    count = sum(len(entries) for entries in batches)
                    where = f"writers/{one.writer}/{number:08d}.seg"
                    self.notes.append(Finding("missing_segment", where, f"{count} blocks lay in it; they are misses"))

    def tree(self, *, fix: bool) -> None:
        """Names, modes and owners; what is not of this format is left alone, always."""
        for path in housekeeping.unknown_names(self._pool):
            self.notes.append(Finding("unknown_name", _inside(self._pool, path), "not of this format; left alone"))
        for path in housekeeping.stale_temporaries(self._pool):
            self.notes.append(Finding("stale_temporary", _inside(self._pool, path), "left behind more than a day ago"))
            self.orphans.append(path)
        self.findings += housekeeping.wrong_access(self._pool, fix=fix)
        self.notes += attachment_notes(self._pool.root) + mount_notes(self._pool.root)

    def remove_orphans(self) -> None:
        """Give back the space of what no entry names and no process fills."""
        for path in self.orphans:
            with contextlib.suppress(OSError):
                (os.rmdir if path.is_dir() else os.unlink)(path)
        for file in self.spent:
            remove_if_dead(self._pool, file.writer, file.name)


def _inside(pool: Pool, path: Path) -> str:
    return str(path.relative_to(pool.root))
