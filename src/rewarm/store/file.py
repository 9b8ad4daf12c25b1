"""The store on a directory: segments and logs of many writers, one index, one read loop, one write loop, one poller.

Any process may open the directory; each appends to files of its own and reads everybody's (docs/reference/format-1.md).
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rewarm.errors import MisuseError, StorageError
from rewarm.store import forks
from rewarm.store.buffers import Borrowed, address_of, export
from rewarm.store.checking import Damage, check_pool
from rewarm.store.compaction import Snapshot, take_snapshot
from rewarm.store.contract import (
    Buffers,
    CheckReport,
    Presence,
    Stats,
    check_keys,
    resolve_namespace,
)
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import Choice
from rewarm.store.eviction import Evictor
from rewarm.store.fallback import Fallback
from rewarm.store.index import NO_ROW, Index, Places
from rewarm.store.keeping import Keeper
from rewarm.store.leases import Leases
from rewarm.store.patience import Mount, Watch, wait_for
from rewarm.store.pool import Pool, close_file
from rewarm.store.reading import ReadLoop
from rewarm.store.reporting import report
from rewarm.store.requests import Failure
from rewarm.store.restoring import WRAPPED, Restorer
from rewarm.store.saving import Command, Group, SaveJob
from rewarm.store.segments import FileCache, Segment, SegmentPin, SegmentTable
from rewarm.store.settings import Settings, visibility_bound_s
from rewarm.store.submitting import submit_save
from rewarm.store.tailing import Tailer, read_flags
from rewarm.store.tending import Tender
from rewarm.store.transfer import BatchTransfer, Counters
from rewarm.store.writer import Manner, Writer, make_writer
from rewarm.store.writing import WriteLoop

Wrap = Callable[[Device], Device]

CANCEL_S = 1.0
"""What `close` allows each thread to end once nothing is left to do but what the kernel holds."""


class FileStore:
    """A `Store` on a pool directory. Made by `rewarm.open`."""

    def __init__(
        self,
        pool: Pool,
        choice: Choice,
        settings: Settings,
        namespace: object,
        mount: Mount,
        *,
        wrap_reads: Wrap | None = None,
        wrap_writes: Wrap = lambda device: device,
    ) -> None:
        self.pool = pool
        self.choice = choice
        self.settings = settings
        self.namespace, self._description = resolve_namespace(namespace)
        self.index = Index()
        self.segments = SegmentTable(pool)
        self.files = FileCache(
            read_flags(choice.direct), close=self._close_file, forgotten=lambda path: self._restorer.forget(path)
        )
        self.lock = threading.RLock()
        self.counters = Counters()
        self.alignment = choice.alignment if choice.direct else 1
        self.sync_first = choice.network or not choice.direct
        self.counts_written = not choice.network
        self.always_bounce = settings.bounce == "always" or choice.network
        self.io_deadline_s = settings.io_deadline_s
        self._mount = mount
        self._forks = forks.count
        self._closed = False
        self._reads = ReadLoop(self, wrap_reads(choice.open()) if wrap_reads else choice.open())
        self._restorer = Restorer(self, self._reads, choice, settings, unshareable=WRAPPED if wrap_reads else "")
        try:
            self._writes = WriteLoop(self, wrap_writes(choice.open()))
        except StorageError:
            self._reads.stop(CANCEL_S)
            raise
        self._save_watch = Watch(self._writes, settings.io_deadline_s)
        self._tender = Tender(settings, self._writes, mount, (self._restorer.watch, self._save_watch))
        self._tailer = Tailer(self, self._tender.own_segment_evicted, self._tender.own_writer_adopted)
        leases = Leases(pool, self._tailer, settings.lease_s, local=not choice.network)
        self._evictor = Evictor(self, self._tailer, self._writes, leases, Keeper(self, self._queue_save))
        self._fallback = Fallback(self, self._tailer, self._name_damage, network=choice.network)
        try:
            self._tender.start(self._tailer, self._evictor)
        except (OSError, RuntimeError) as error:
            self.close()
            raise StorageError(f"cannot open {pool.root}: {error}") from error

    def _close_file(self, descriptor: int) -> None:
        """Close a file; over a network even that may hang."""
        if self.choice.network:
            self._mount.later(lambda: close_file(descriptor))
        else:
            close_file(descriptor)

    # The data path.

    def lookup(self, keys: Sequence[bytes]) -> Presence:
        """Which keys are held. Reads memory only: never blocks on I/O."""
        self._usable()
        check_keys(keys)
        return Presence.of(self.index.contains(keys))

    def __contains__(self, key: bytes) -> bool:
        self._usable()
        check_keys((key,))
        return self.index.has(key)

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Read blocks into the caller's writable buffers. A buffer of another size than the block is `wrong_size`."""
        self._usable()
        return self._restorer.load(keys, buffers)

    def save(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Queue blocks for writing. True in `wait` means published, or already there; over budget is refused."""
        self._usable()
        check_keys(keys)
        return self._queue_save(keys, buffers)

    def _queue_save(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        limit = self.settings.save_queue_bytes
        return submit_save(keys, buffers, self.counters, limit, self._put_save, self._writes.wake)

    def _put_save(
        self, transfer: BatchTransfer, keys: Sequence[bytes], buffers: Callable[[], Borrowed], queued_bytes: int
    ) -> bool:
        job = SaveJob(transfer, keys, buffers)
        job.queued_bytes = queued_bytes
        self._save_watch.add(transfer)
        return self._writes.put(job)

    # Keeping and dropping.

    def pin(self, keys: Sequence[bytes]) -> SegmentPin:
        """Keep this handle from evicting the segments of these keys until the pin is released."""
        self._usable()
        check_keys(keys)
        with self.lock:
            places = self.index.places(keys)
            mask = places.row != NO_ROW
            segments = [self.segments[slot] for slot in np.unique(places.segment[mask]).tolist()]
            for segment in segments:
                segment.pins += 1
        return SegmentPin(mask, segments, self.lock)

    def evict(self, to_bytes: int) -> int:
        """Drop whole sealed segments, oldest first, until at most `to_bytes` are used; returns bytes freed."""
        if to_bytes < 0:
            raise MisuseError(f"to_bytes must not be negative, got {to_bytes}")
        self.refresh()
        return self._command(lambda: self._evictor.evict_to(to_bytes), drained=False)

    def erase(self) -> int:
        """Remove every block of this handle's namespace, whoever wrote it; returns bytes freed."""
        self.refresh()
        return self._command(self._evictor.erase, drained=True)

    def flush(self) -> None:
        """Wait until everything saved so far is published and synced to the medium."""
        self._command(self._flush, drained=True)

    def _flush(self) -> int:
        self._writes.appender.flush()
        return self._evictor.measure().used_bytes

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify every file and block of the pool; with `fix` repair or remove what is damaged."""
        self._usable()
        read_s = [time.monotonic()]

        def progress(count: int) -> None:
            self.counters.add(bytes_read=count)
            read_s[0] = time.monotonic()

        def run() -> CheckReport:
            drop = self._drop_damage if fix else None
            local = not self.choice.network
            return check_pool(self.pool, direct=self.choice.direct, local=local, drop=drop, progress=progress)

        try:
            found = self._mount.call(run, alive_s=lambda: read_s[0])
        except OSError as error:
            raise StorageError(f"cannot check {self.pool.root}: {error.strerror}") from error
        if fix:
            self._tailer.restart()
            self.refresh()
        return found

    def refresh(self) -> None:
        """Read what other writers have published since the last poll; returns when it is visible to `lookup`."""
        self._usable()
        try:
            self._mount.call(self._tailer.refresh)
        except OSError as error:
            raise StorageError(f"cannot read {self.pool.root}: {error.strerror}") from error

    def register(self, arena: Any) -> int:
        """Announce memory that many buffers will come from; returns the bytes that the read device pinned.

        The arena stays exported, so it cannot be unmapped, until the store is closed.
        """
        self._usable()
        memory = export(arena)
        pinned = self._restorer.register(memory)
        self._writes.register(address_of(memory), len(memory))
        return pinned

    def stats(self) -> Stats:
        """Counters since open."""
        loops = [loop.broken for loop in (self._reads, self._writes) if loop.broken]
        unreadable = self._tailer.unreadable_logs
        notes = [
            *loops,
            *self._restorer.notes(),
            *self._writes.device_notes(),
            *([f"{unreadable} logs could not be read"] if unreadable else []),
            *(["rewarm-poll: ended by a defect"] if self._tender.ended() else []),
        ]
        return report(
            self.counters,
            self.choice,
            capacity_bytes=self.pool.facts.capacity_bytes,
            used_bytes=self._evictor.used_bytes,
            blocks=len(self.index),
            visibility_bound_s=visibility_bound_s(self.choice, self.settings.poll_s),
            registered_bytes=self._restorer.registered_bytes,
            notes=notes,
        )

    # Life.

    def close(self) -> None:
        """Finish queued saves within a bounded time, stop threads, give the medium back. Idempotent."""
        if self._closed or forks.count != self._forks:
            return
        self._closed = True
        self._tender.stop()
        deadline_s = time.monotonic() + self.settings.close_timeout_s
        ended = self._writes.stop(self.settings.close_timeout_s)
        if not ended:
            self._writes.cancel_all()
            ended = self._writes.stop(CANCEL_S)
        self._restorer.stop(max(deadline_s - time.monotonic(), CANCEL_S), keep_arenas=not ended)
        self._tender.join(max(deadline_s - time.monotonic(), CANCEL_S))
        with contextlib.suppress(OSError):
            self._mount.call(self.files.close, deadline_s=max(deadline_s - time.monotonic(), CANCEL_S))
        self._mount.end()

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the loops ask of their store.

    def path_of(self, slot: int) -> Path:
        """Path of a segment."""
        return self.segments[slot].path

    def holds(self, key: bytes) -> bool:
        """True when the key is published."""
        return self.index.has(key)

    def next_place(self, key: bytes, slot: int, offset: int, failure: Failure, attempt: int) -> Places | None:
        """Where to read a block after its `attempt`-th failure, at this place; None where there is no copy left."""
        return self._fallback.next_place(key, slot, offset, failure, attempt)

    def new_writer(self) -> Writer:
        """Make a writer for this handle. Raises `OSError`."""
        manner = Manner(self.choice.direct, self.sync_first, self.settings.lease_s, self.settings.log_keep_s)
        writer = make_writer(self, self._tailer.own_writers, self._description, manner)
        if self._fallback.pending():
            self._writes.put(Command(self._write_drops, drained=False))
        return writer

    def snapshot(self, writer_id: str, damage: list[tuple[Segment, int]]) -> Snapshot:
        """What a new log of this handle's writer begins with. Raises `OSError` while some of its files are missing."""
        if self._tailer.lacks_own_files():
            raise FileNotFoundError(errno.ENOENT, "segments cannot be found now: their blocks must not be forgotten")
        return take_snapshot(self, writer_id, damage)

    def left(self, writer_id: str) -> None:
        """Read what a writer of this handle has left behind as one reads that of others."""
        self._tailer.own_writers.discard(writer_id)

    def make_room(self, need: int, *, full: bool = False, marks: bool = True) -> bool:
        """Evict until `need` bytes fit; `full` when the medium itself said so. Raises `OSError`."""
        return self._evictor.make_room(need, full=full, marks=marks)

    def published(self, group: Group) -> None:
        """Put a group's blocks into the index."""
        lengths = group.job.borrowed.lengths[group.blocks].astype(np.uint32)
        keys = [group.job.keys[block] for block in group.blocks]
        checksums = np.frombuffer(b"".join(group.checksums), "V16")
        slots = np.full(len(keys), group.target.segment.slot, np.int64)
        with self.lock:
            if not group.target.segment.gone:
                group.target.segment.indexed = True
                self.index.add(keys, slots, np.array(group.offsets, np.uint64), lengths, checksums)

    def _name_damage(self) -> None:
        """Have damage named in the log, if there is one: reading alone makes no writer."""
        if self._writes.appender.writer is not None:
            self._writes.put(Command(self._write_drops, drained=False))

    def _write_drops(self) -> int:
        return self._evictor.announce_drops(self._fallback.take())

    def _drop_damage(self, damage: list[Damage]) -> None:
        self._fallback.note([(self.segments.get(writer, number), offset) for writer, number, offset in damage])
        self._command(self._write_drops, drained=False)

    def _command(self, action: Callable[[], int], *, drained: bool) -> int:
        self._usable()
        command = Command(action, drained=drained)
        if not self._writes.put(command):
            raise StorageError(f"{self.pool.root}: {self._writes.broken or 'the store is closing'}")
        try:
            return wait_for(command.future, self.io_deadline_s, lambda: self._writes.turned_s)
        except OSError as error:
            raise StorageError(f"{self.pool.root}: {error.strerror or error}") from error

    def _usable(self) -> None:
        if self._closed:
            raise MisuseError("the store is closed")
        if forks.count != self._forks:
            raise MisuseError("the store was opened before a fork; open it again in the child")
