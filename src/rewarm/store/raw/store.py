"""The store on a raw pool: `block:///dev/disk/by-id/..`. One host owns it and saves; every host attached reads it.

All handles tail the owner's log from the medium. Handles of one process share its owner. A handle that is not the owner
refuses saves (`refused_admission`) and pins nothing for others. See docs/reference/raw-1.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError, RewarmError, StorageError
from rewarm.store import forks
from rewarm.store.buffers import address_of, export
from rewarm.store.contract import Buffers, CheckReport, Presence, Stats, check_keys, resolve_namespace
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import Choice
from rewarm.store.index import NO_ROW, Index, Places
from rewarm.store.patience import Watch, wait_for
from rewarm.store.raw.checking import check_slots
from rewarm.store.raw.following import Follower
from rewarm.store.raw.header import Header
from rewarm.store.raw.media import Media
from rewarm.store.raw.owner import Owner
from rewarm.store.raw.pinning import RawPin
from rewarm.store.raw.reopening import Reopener
from rewarm.store.raw.saving import Job, SaveThread
from rewarm.store.raw.sharing import release
from rewarm.store.reading import ReadLoop
from rewarm.store.reporting import report
from rewarm.store.requests import Failure
from rewarm.store.segments import FileCache
from rewarm.store.settings import Settings
from rewarm.store.submitting import submit_load, submit_save
from rewarm.store.tailing import read_flags
from rewarm.store.tending import WATCH_SHARE
from rewarm.store.transfer import BatchTransfer, Counters

Wrap = Callable[[Device], Device]
OwnAgain = Callable[[Header, Owner], Owner | None]
"""Becomes the owner of a pool with this header after an owner of this process was lost."""

CANCEL_S = 1.0

NO_PROCESS = "io=process: a raw pool is read by the thread: its device may go, and come back under another name"

log = logging.getLogger("rewarm.store")


class RawStore:
    """A `Store` on a raw pool. Made by `rewarm.open`; `owner` is None for a reader.

    `path` is what the user gave: after the device has gone and come back it may lead to another device file.
    """

    def __init__(
        self,
        path: str,
        media: Media,
        header: Header,
        choice: Choice,
        settings: Settings,
        namespace: object,
        owner: Owner | None,
        *,
        own_again: OwnAgain = lambda _header, _lost: None,
        wrap_reads: Wrap = lambda device: device,
        wrap_writes: Wrap = lambda device: device,
    ) -> None:
        self.namespace, _ = resolve_namespace(namespace)
        self.path = Path(path)
        self.choice = choice
        self.settings = settings
        self.counters = Counters()
        self.alignment = choice.alignment if choice.direct else 1
        self.always_bounce = settings.bounce == "always" or choice.network
        self.io_deadline_s = settings.io_deadline_s
        # A device that answers is open already: nothing here ever waits for one.
        self.files = FileCache(read_flags(choice.direct), opener=lambda path, flags: os.dup(self._log.media.descriptor))
        self._owner = owner
        self._own_again = own_again
        self._header = header
        self._log = Follower(media, header, self.namespace, self.path)
        self._reopener = Reopener(
            path, self.namespace, direct=choice.direct, deadline_s=settings.io_deadline_s, poll_s=settings.poll_s
        )
        self._forks = forks.count
        self._closed = False
        self._arenas: list[npt.NDArray[np.uint8]] = []
        self._registered_bytes = 0
        self._unreadable = ""
        self._reads = ReadLoop(self, wrap_reads(choice.open()))
        self._read_watch = Watch(self._reads, settings.io_deadline_s)
        if settings.io == "process":
            log.warning("%s: %s", self.path, NO_PROCESS)
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

    @property
    def index(self) -> Index:
        """Which blocks are where, as the log was read last."""
        return self._log.index

    # Following the log.

    def catch_up(self) -> None:
        """Read what was published since the last poll. Raises `OSError`, within the deadline of I/O."""
        followed = self._log
        try:
            followed.catch_up()
        finally:
            self.counters.add(bytes_log=followed.take_read_bytes())

    def _poll(self) -> None:
        """Follow the log, at least as often as the owner counts on; watch over the reads in between."""
        next_s = 0.0
        while not self._stop.wait(self._turn_s()):
            self._read_watch.look()
            if time.monotonic() >= next_s:
                self._follow()
                next_s = time.monotonic() + self._poll_s()

    def _poll_s(self) -> float:
        promised_s = self._log.header.poll_ms / 1000
        return min(self.settings.poll_s, promised_s or self.settings.poll_s)

    def _turn_s(self) -> float:
        return min(self._poll_s(), self.io_deadline_s / WATCH_SHARE)

    def _follow(self) -> None:
        try:
            self.catch_up()
            self._reopener.back()
            self._unreadable = ""
        except OSError as error:
            self._lost(error)
        try:
            if self._owner and self._owner.lost and not self._unreadable:
                self._replace_owner(self._owner)
        except (OSError, RewarmError) as error:
            self._unreadable = f"this process could not become the owner again: {error}"

    def _lost(self, error: OSError) -> None:
        """The log cannot be read: go on with the device where it is found again."""
        if not self._unreadable:
            log.warning("%s: the log cannot be read: %s; looking for the device until it is back", self.path, error)
        found = self._reopener.look(self._log.header)
        why = f"; {self._reopener.why}" if self._reopener.why else ""
        self._unreadable = f"the log could not be read: {error.strerror or error}{why}"
        if found is None:
            return
        former, self._log = self._log, found
        self.files.forget(former.name)
        former.media.close()
        log.warning("%s: the device is back, as %s", self.path, found.media.path)
        self._reopener.back()
        self._unreadable = ""
        if self._owner:
            self._owner.look()

    def _replace_owner(self, lost: Owner) -> None:
        """This process was too late: become the owner anew, where nobody else has. Raises `OSError`."""
        fresh = self._own_again(self._log.header, lost)
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
        followed = self._log
        return submit_load(keys, buffers, followed.index, followed.lock, self.counters, self._reads, self._read_watch)

    def save(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Queue blocks for writing; refused (`refused_admission`) where another process or host owns the pool."""
        self._usable()
        check_keys(keys)
        limit = self.settings.save_queue_bytes
        return submit_save(keys, buffers, self.counters, limit, lambda *job: self._saves.put(Job(*job)))

    # Keeping and dropping.

    def pin(self, keys: Sequence[bytes]) -> RawPin:
        """Keep this process from evicting these keys; another host's owner knows nothing of it."""
        self._usable()
        check_keys(keys)
        followed = self._log
        with followed.lock:
            places = followed.index.places(keys)
            mask = places.row != NO_ROW
            pinned = [(slot, followed.generation(slot)) for slot in np.unique(places.segment[mask]).tolist()]
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
            found = check_slots(self._log.media, self._log.table, self.counters, self._owner if fix else None)
        except OSError as error:
            raise StorageError(f"cannot check {self.path}: {error.strerror or error}") from error
        self.refresh()
        return found

    def refresh(self) -> None:
        """Read what was published since the last poll; returns when it is visible to `lookup`."""
        self._usable()
        try:
            self.catch_up()
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror or error}") from error

    def register(self, arena: Any) -> int:
        """Announce memory that many buffers will come from; returns the bytes that the read device pinned."""
        self._usable()
        memory = export(arena)
        self._arenas.append(memory)
        pinned = self._reads.register(address_of(memory), len(memory))
        self._registered_bytes += pinned
        return pinned

    def stats(self) -> Stats:
        """Counters since open."""
        notes = [note for note in (self._reads.broken, self._saves.broken, self._unreadable) if note]
        if self.settings.io == "process":
            notes.append(NO_PROCESS)
        if self.read_only:
            notes.append("this handle reads only: another process or host owns the pool, or it is not this host's")
        elif self._owner and self._owner.media.block and not self._owner.reservation.held:
            notes.append(f"no fence against a late owner: reservations: {self._owner.reservation.why_not}")
        return report(
            self.counters,
            self.choice,
            capacity_bytes=self._header.capacity_bytes,
            used_bytes=len(self._log.table.used) * self._header.slot_bytes,
            blocks=len(self.index),
            visibility_bound_s=self.settings.poll_s,
            registered_bytes=self._registered_bytes,
            notes=[*notes, *self._reads.device_notes()],
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
            self._saves.cancel()
            ended = self._saves.stop(CANCEL_S)
        self._reads.cancel_all()
        ended &= self._reads.stop(max(deadline_s - time.monotonic(), CANCEL_S))
        if ended:
            self._arenas.clear()
        if self._poller.is_alive():
            self._poller.join(max(deadline_s - time.monotonic(), CANCEL_S))
        self._reopener.end()
        self.files.close()
        self._log.media.close()
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
        """All slots lie on one device: the one that is open now."""
        return self._log.name

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
        with self._log.lock:
            places = self.index.places([key])
        return None if places.row[0] == NO_ROW else places

    def _forget(self, key: bytes, slot: int, offset: int, failure: Failure) -> None:
        self._log.forget(key, slot, offset)
        generation, place = self._log.generation(slot), offset - self._header.slot_offset(slot)
        owner = self._owner
        if owner and not owner.lost and failure is Failure.MISMATCH:
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
