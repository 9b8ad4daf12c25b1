"""The store on a raw pool: `block:///dev/disk/by-id/..`. One host owns it and saves; every host attached reads it.

All handles tail the owner's log from the medium. Handles of one process share its owner. A handle that is not the owner
refuses saves (`refused_admission`) and pins nothing for others. See docs/reference/raw-1.md.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rewarm.errors import MisuseError, StorageError
from rewarm.store import forks
from rewarm.store.buffers import borrow, export, hold
from rewarm.store.contract import Buffers, CheckReport, Outcome, Presence, Stats, check_keys, resolve_namespace
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import Choice
from rewarm.store.index import NO_ROW, Index, Places
from rewarm.store.layout import Frame, Kind
from rewarm.store.patience import Mount, wait_for
from rewarm.store.raw.checking import check_slots
from rewarm.store.raw.header import Header
from rewarm.store.raw.media import Media, open_raw
from rewarm.store.raw.owner import Owner
from rewarm.store.raw.pinning import RawPin
from rewarm.store.raw.saving import Job, SaveThread
from rewarm.store.raw.sharing import release
from rewarm.store.raw.slots import LogTail, SlotTable
from rewarm.store.reading import ReadLoop
from rewarm.store.reporting import report
from rewarm.store.requests import Failure
from rewarm.store.restoring import WRAPPED, Restorer
from rewarm.store.segments import FileCache
from rewarm.store.settings import Settings
from rewarm.store.tailing import read_flags
from rewarm.store.transfer import BatchTransfer, Counters, settled_transfer

CANCEL_S = 1.0


class RawStore:
    """A `Store` on a raw pool. Made by `rewarm.open`; `owner` is None for a reader."""

    def __init__(
        self,
        media: Media,
        header: Header,
        choice: Choice,
        settings: Settings,
        namespace: object,
        owner: Owner | None,
        *,
        own_again: Callable[[Header], Owner | None] = lambda _: None,
        wrap_reads: Callable[[Device], Device] | None = None,
        wrap_writes: Callable[[Device], Device] = lambda device: device,
    ) -> None:
        self.namespace, _ = resolve_namespace(namespace)
        self.path = Path(media.path)
        self.choice = choice
        self.settings = settings
        self.counters = Counters()
        self.index = Index()
        self.lock = threading.RLock()
        self._tailing = threading.Lock()
        """Held while the log is read. Never by a load or a look-up: a medium may keep such a read for ever."""
        self._mount = Mount(settings.io_deadline_s)
        self.alignment = choice.alignment if choice.direct else 1
        self.always_bounce = settings.bounce == "always" or choice.network
        self.io_deadline_s = settings.io_deadline_s
        self.files = FileCache(read_flags(choice.direct), opener=open_raw)
        self._owner = owner
        self._own_again = own_again
        self._media = media
        self._header = header
        self._table = SlotTable(header)
        self._fresh: Index | None = None
        self._tail = LogTail(media, self._take_frame, self._begin_log)
        self._forks = forks.count
        self._closed = False
        self._evicted = 0
        self._unreadable = ""
        reads = ReadLoop(self, wrap_reads(choice.open()) if wrap_reads else choice.open())
        self._reads = reads
        self._restorer = Restorer(self, reads, choice, settings, raw=True, unshareable=WRAPPED if wrap_reads else "")
        self._saves = SaveThread(self, lambda: wrap_writes(choice.open()))
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="rewarm-raw-poll", daemon=True)
        try:
            self.catch_up()
            self._poller.start()
        except (OSError, RuntimeError) as error:
            self.close()
            raise StorageError(f"cannot read {self.path}: {error}") from error

    @property
    def owner(self) -> Owner | None:
        """The pool's owner in this process, if it is one."""
        return self._owner

    @property
    def read_only(self) -> bool:
        """True when saves are refused, because another process or host owns the pool."""
        return self._owner is None or self._owner.lost

    # Following the log.

    def catch_up(self) -> None:
        """Read what was published since the last poll. Raises `OSError`."""
        with self._tailing:
            try:
                self._tail.refresh()
            finally:
                with self.lock:
                    if self._fresh is not None:
                        self.index, self._fresh = self._fresh, None

    def _begin_log(self, header: Header) -> None:
        """Another log half counts: what it says replaces everything, at once for whoever looks keys up."""
        with self.lock:
            self._table = SlotTable(header)
            self._fresh = Index()

    def _take_frame(self, frame: Frame) -> None:
        with self.lock:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        index = self.index if self._fresh is None else self._fresh
        gone = self._table.apply(frame)
        if gone:
            index.remove_segments(gone)
        if frame.kind == Kind.DROPPED:
            for slot in self._table.used.values():
                index.remove_places(slot.number, [self._header.slot_offset(slot.number) + at for at in slot.dropped])
        if frame.kind != Kind.ENTRIES or frame.namespace != self.namespace:
            return
        entries = self._table.taken
        if not len(entries):
            return
        starts = self._header.slot_offset(0) + entries["segment"].astype(np.uint64) * self._header.slot_bytes
        offsets = starts + entries["offset"]
        slots = entries["segment"].astype(np.int64)
        index.add(entries["key"].tolist(), slots, offsets, entries["length"], entries["checksum"])

    def _poll(self) -> None:
        """Follow the log, at least as often as the owner counts on."""
        while True:
            promised_s = self._tail.header.poll_ms / 1000 if self._tail.header and self._tail.header.poll_ms else 1e9
            if self._stop.wait(min(self.settings.poll_s, promised_s)):
                return
            self._restorer.watch.look()
            try:
                self.catch_up()
                self._unreadable = ""
                if self._owner and self._owner.lost:
                    self._replace_owner(self._owner)
            except OSError as error:
                self._unreadable = f"the log could not be read: {error}"

    def _replace_owner(self, lost: Owner) -> None:
        """This process was too late: become the owner anew, where nobody else has. Raises `OSError`."""
        fresh = self._own_again(self._tail.header or self._header)
        if fresh:
            self._owner = fresh
            release(lost)

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
        """Queue blocks for writing; refused (`refused_admission`) where another process or host owns the pool."""
        self._usable()
        check_keys(keys)
        held, sizes = hold(buffers, len(keys))
        if not keys:
            return settled_transfer(0, Outcome.ALREADY, self.counters, loading=False)
        count = next(
            (i for i, size in enumerate(sizes) if not self.counters.reserve(size, self.settings.save_queue_bytes)),
            len(sizes),
        )
        transfer = BatchTransfer(len(keys), self.counters, loading=False)
        transfer.settle(range(count, len(keys)), Outcome.REFUSED_BUDGET)
        total = sum(sizes[:count])
        self.counters.add(borrowed_bytes=total)
        job = Job(transfer, keys[:count], lambda: borrow(held[:count], count, writable=False), total)
        if not count or not self._saves.put(job):
            self.counters.add(queued_bytes=-total, borrowed_bytes=-total)
            transfer.settle(range(count), Outcome.LOST_MEDIUM)
            transfer.release()
        return transfer

    # Keeping and dropping.

    def pin(self, keys: Sequence[bytes]) -> RawPin:
        """Keep this process from evicting these keys; another host's owner knows nothing of it."""
        self._usable()
        check_keys(keys)
        with self.lock:
            places = self.index.places(keys)
            mask = places.row != NO_ROW
            slots = np.unique(places.segment[mask]).tolist()
            pinned = [(slot, self._table.generations.get(slot, 0)) for slot in slots]
        return RawPin(mask, pinned, self._owner)

    def evict(self, to_bytes: int) -> int:
        """Free the oldest sealed slots until at most `to_bytes` are used; returns bytes freed (a reader frees 0)."""
        if to_bytes < 0:
            raise MisuseError(f"to_bytes must not be negative, got {to_bytes}")
        return self._command(lambda owner: self._count_evicted(owner.evict_to(to_bytes)))

    def erase(self) -> int:
        """Free every slot of this handle's namespace; returns bytes freed. Raises `StorageError` on a reader."""
        self._usable()
        if self.read_only:
            raise StorageError(f"{self.path} is owned by another process or host; erase it there")
        return self._command(lambda owner: self._count_evicted(owner.erase(self.namespace)))

    def _count_evicted(self, freed: int) -> int:
        self.counters.add(evicted_bytes=freed, evicted_segments=freed // self._header.slot_bytes)
        return freed

    def flush(self) -> None:
        """Wait until everything saved so far is published and synced to the medium."""

        def flush(owner: Owner) -> int:
            with owner.lock:
                owner.seal(self.namespace)
                owner.sync()
            return 0

        self._command(flush)

    def check(self, *, fix: bool = False) -> CheckReport:
        """Verify every block of the pool, of all namespaces; with `fix` the owner drops what is damaged."""
        self.refresh()
        try:
            found = check_slots(self._media, self._table, self.counters, self._owner if fix else None)
        except OSError as error:
            raise StorageError(f"cannot check {self.path}: {error.strerror or error}") from error
        self.refresh()
        return found

    def refresh(self) -> None:
        """Read what was published since the last poll; returns when it is visible to `lookup`."""
        self._usable()
        try:
            self._mount.call(self.catch_up)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror or error}") from error

    def register(self, arena: Any) -> int:
        """Announce memory that many buffers will come from; returns the bytes that the read device pinned."""
        self._usable()
        return self._restorer.register(export(arena))

    def stats(self) -> Stats:
        """Counters since open."""
        notes = [note for note in (self._reads.broken, self._saves.broken, self._unreadable) if note]
        if self.read_only:
            notes.append("this handle reads only: another process or host owns the pool, or it is not this host's")
        return report(
            self.counters,
            self.choice,
            capacity_bytes=self._header.capacity_bytes,
            used_bytes=len(self._table.used) * self._header.slot_bytes,
            blocks=len(self.index),
            visibility_bound_s=self.settings.poll_s,
            registered_bytes=self._restorer.registered_bytes,
            notes=[*notes, *self._restorer.notes()],
        )

    # Life.

    def close(self) -> None:
        """Finish queued saves within a bounded time, stop threads, give the medium back. Idempotent."""
        if self._closed or forks.count != self._forks:
            return
        self._closed = True
        self._stop.set()
        deadline_s = time.monotonic() + self.settings.close_timeout_s
        ended = self._saves.stop(self.settings.close_timeout_s)
        if not ended:
            self._saves.cancelling = True
            ended = self._saves.stop(CANCEL_S)
        self._restorer.stop(max(deadline_s - time.monotonic(), CANCEL_S), keep_arenas=not ended)
        if self._poller.is_alive():
            self._poller.join(max(deadline_s - time.monotonic(), CANCEL_S))
        self._mount.end()
        self.files.close()
        self._media.close()
        if self._owner:
            with contextlib.suppress(OSError):
                release(self._owner)

    def __enter__(self) -> RawStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the loops ask of their store.

    def path_of(self, slot: int) -> Path:
        """All slots lie on one device."""
        return self.path

    def holds(self, key: bytes) -> bool:
        """True when the key is published."""
        return self.index.has(key)

    def next_place(self, key: bytes, slot: int, offset: int, failure: Failure, attempt: int) -> Places | None:
        """Once more after a look at the log: the slot may have been used again. Then the copy is forgotten."""
        if attempt == 1 and failure is not Failure.MEDIUM:
            with contextlib.suppress(OSError):
                self.catch_up()
        elif attempt > 1 and failure is not Failure.MEDIUM:
            self._forget(key, slot, offset, failure)
        with self.lock:
            places = self.index.places([key])
        return None if places.row[0] == NO_ROW else places

    def _forget(self, key: bytes, slot: int, offset: int, failure: Failure) -> None:
        with self.lock:
            self.index.remove_copy(key, slot, offset)
            generation = self._table.generations.get(slot, 0)
        owner = self._owner
        if owner and not owner.lost and failure is Failure.MISMATCH:
            place = offset - self._header.slot_offset(slot)
            self._saves.put((Future(), lambda: owner.drop(slot, generation, place)))

    def _command(self, action: Callable[[Owner], int]) -> int:
        self._usable()
        owner = self._owner
        if owner is None or owner.lost:
            return 0
        future: Future[int] = Future()
        if not self._saves.put((future, lambda: action(owner))):
            raise StorageError(f"{self.path}: {self._saves.broken or 'the store is closing'}")
        try:
            answer = wait_for(future, self.io_deadline_s, lambda: self._saves.turned_s)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}") from error
        self.refresh()
        return answer

    def _usable(self) -> None:
        if self._closed:
            raise MisuseError("the store is closed")
        if forks.count != self._forks:
            raise MisuseError("the store was opened before a fork; open it again in the child")
