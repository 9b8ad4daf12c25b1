"""Loads of a store that reads a medium: by its own thread, or by an I/O process where one is wanted and can see memory.

Index, look-ups and what to do about a copy that could not be read stay here, whoever reads; a load that the process
cannot do, or has not done, is the thread's. What is active, and why not more, is in `notes`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError, StorageError
from rewarm.store.buffers import Held, address_of, borrow, hold_writable
from rewarm.store.contract import Buffers, Outcome, check_keys
from rewarm.store.devices.select import Choice
from rewarm.store.index import NO_ROW, Index
from rewarm.store.patience import Watch
from rewarm.store.process.arena import find_shared
from rewarm.store.process.child import Terms
from rewarm.store.process.engine import IoProcess
from rewarm.store.process.remote import RemoteLoad, remote_addresses
from rewarm.store.process.wire import STEP_ROWS
from rewarm.store.process.witness import new_token
from rewarm.store.reading import ReadLoop
from rewarm.store.settings import Settings
from rewarm.store.submitting import read_blocks, submit_load
from rewarm.store.tailing import read_flags
from rewarm.store.transfer import BatchTransfer, Counters
from rewarm.units import format_size

log = logging.getLogger("rewarm.store")

WRAPPED = "reads are throttled or made to fail by a wrapper, which is not in another process"

REMARKS_MAX = 8
"""Lines about arenas that `notes` keeps."""

_never_freed: list[object] = []
"""What an I/O process was left behind with: its memory may still be written to, and stays mapped."""


class Restoring(Protocol):
    """What is asked of the store."""

    index: Index
    lock: threading.RLock
    counters: Counters
    alignment: int
    always_bounce: bool

    def path_of(self, slot: int) -> Path:
        """Path of a segment."""


class Restorer:
    """The loads of one store. `unshareable` says why no other process can read for it, empty where one can."""

    def __init__(
        self,
        store: Restoring,
        loop: ReadLoop,
        choice: Choice,
        settings: Settings,
        *,
        unshareable: str = "",
    ) -> None:
        self.watch = Watch(loop, settings.io_deadline_s)
        self.registered_bytes = 0
        self._store = store
        self._loop = loop
        self._wanted = settings.io == "process"
        self._unshareable = unshareable
        self._remarks: list[str] = []
        self._process: IoProcess | None = None
        self._arenas: list[npt.NDArray[np.uint8]] = []
        self._by_thread = 0
        self._again = 0
        if self._wanted and unshareable:
            log.warning("io=process: %s; the store reads by its thread", unshareable)
        self._terms = Terms(
            device=choice.name,
            depth=choice.depth,
            alignment=store.alignment,
            always_bounce=store.always_bounce,
            io_deadline_s=settings.io_deadline_s,
            flags=read_flags(choice.direct),
            token=0 if store.always_bounce else new_token(),
            parent=os.getpid(),
        )

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """See `Store.load`."""
        process = self._process
        if process is not None and not process.ended and len(keys):
            check_keys(keys)
            held, sizes = hold_writable(buffers, len(keys))
            addresses = remote_addresses(process.arenas, held, sizes)
            if addresses is not None:
                transfer = self._load_by_process(process, list(keys), held, sizes, addresses)
                if transfer is not None:
                    return transfer
            buffers = held
        if self._wanted:
            self._by_thread += 1
        store = self._store
        return submit_load(keys, buffers, store.index, store.lock, store.counters, self._loop, self.watch)

    def register(self, memory: npt.NDArray[np.uint8]) -> int:
        """Announce exported memory; returns the bytes pinned. It stays exported until `stop`."""
        self._arenas.append(memory)
        pinned = self._share(memory) if self._wanted else None
        if pinned is None:
            pinned = self._loop.register(address_of(memory), len(memory))
        self.registered_bytes += pinned
        return pinned

    def forget(self, path: Path) -> None:
        """A file is gone: the process is to close it."""
        if self._process is not None:
            self._process.forget(path)

    def notes(self) -> list[str]:
        """What reads, and why nothing better: lines for people, none where nothing was asked for."""
        notes = self._loop.device_notes()
        if not self._wanted:
            return notes
        process, remarks = self._process, self._remarks
        if process is None:
            now = f"reads by the thread: {self._unshareable or 'no shared arena is registered yet'}"
            remarks = [remark for remark in remarks if remark != self._unshareable]
        elif process.ended:
            now = process.ended
        elif process.silent():
            now = f"process {process.pid} does not answer; loads go through the thread meanwhile"
        else:
            shared = format_size(sum(span.end - span.start for span in process.arenas))
            now = f"process {process.pid} reads into {shared} of shared arenas"
        if self._by_thread:
            remarks = [*remarks, f"{self._by_thread} loads went through the thread"]
        if self._again:
            remarks = [*remarks, f"{self._again} blocks were read by the thread, because the process could not"]
        return [*notes, *(f"io=process: {line}" for line in (now, *remarks))]

    def stop(self, timeout_s: float, *, keep_arenas: bool = False) -> None:
        """End process and thread within seconds; what can be cancelled is. Arenas with I/O in flight are kept."""
        deadline_s = time.monotonic() + timeout_s
        ended = self._process is None or self._process.stop(timeout_s)
        self._loop.cancel_all()
        ended &= self._loop.stop(max(deadline_s - time.monotonic(), min(timeout_s, 1.0)))
        if ended and not keep_arenas:
            self._arenas.clear()
        elif self._process is not None and self._process.outstanding():
            _never_freed.append(self)

    # By the process.

    def _share(self, memory: npt.NDArray[np.uint8]) -> int | None:
        """Have the process, started with the first arena, read into this one; None where it cannot."""
        address, length = address_of(memory), len(memory)
        process = self._process
        if process is not None and any(address < span.end and span.start < address + length for span in process.arenas):
            raise MisuseError(f"memory at {address:#x} is registered already")
        if self._unshareable or (process is not None and process.ended):
            return None
        found = find_shared(address, length)
        if isinstance(found, str):
            self._remark(f"loads into an arena of {format_size(length)} go through the thread: {found}")
            return None
        try:
            self._process = process = process or IoProcess(self._terms, self._store.path_of, self._over, self._count)
            pinned, said = process.add_arena(address, length, found.descriptor, found.offset)
        except StorageError as error:
            if process is None:
                self._unshareable = str(error)
            self._remark(str(error))
            return None
        finally:
            os.close(found.descriptor)
        if said:
            self._remark(said)
        return pinned

    def _remark(self, what: str) -> None:
        self._remarks = sorted({*self._remarks, what})[-REMARKS_MAX:]
        log.warning("io=process: %s", what)

    def _load_by_process(
        self, process: IoProcess, keys: list[bytes], held: Held, sizes: list[int], addresses: list[int]
    ) -> BatchTransfer | None:
        """The load handed over step by step; None where the process cannot take it now."""
        number = process.new_number()
        counters = self._store.counters
        transfer = BatchTransfer(len(keys), counters, loading=True, wake=lambda: process.cancel(number))
        load = process.begin(number, transfer, keys, held)
        if load is None:
            return None
        load.bytes = sum(sizes)
        counters.add(borrowed_bytes=load.bytes)
        try:
            for start in range(0, len(keys), STEP_ROWS):
                self._add_step(load, start, sizes, addresses)
                process.send(load, last=False)
        finally:
            process.send(load, last=True)
            if not load.blocks:
                self._over(load, [])
        return transfer

    def _add_step(self, load: RemoteLoad, start: int, sizes: list[int], addresses: list[int]) -> None:
        """Look up some keys and add a row for each that is held in this size."""
        step = slice(start, start + STEP_ROWS)
        with self._store.lock:
            places = self._store.index.places(load.keys[step])
        held, fits = places.row != NO_ROW, places.length == np.array(sizes[step])
        wanted = held & fits
        if not wanted.all():
            load.transfer.settle(start + np.flatnonzero(~held), Outcome.MISSING)
            load.transfer.settle(start + np.flatnonzero(held & ~fits), Outcome.WRONG_SIZE)
        blocks = (start + np.flatnonzero(wanted)).tolist()
        if blocks:
            self._store.index.note_reads(places.row[wanted])
            load.add(blocks, places, wanted, [addresses[block] for block in blocks])

    def _over(self, load: RemoteLoad, rest: list[int]) -> None:
        """Nothing of a load is with the process: its thread reads what was not read, else the memory is given back."""
        store = self._store
        if not rest or load.transfer.done():
            store.counters.add(borrowed_bytes=-load.bytes)
            load.transfer.release()
            return
        self._again += len(rest)
        borrowed, blocks = borrow(load.held, len(load.keys), writable=True), np.array(rest, np.int64)
        read_blocks(
            load.transfer,
            load.keys,
            borrowed,
            blocks,
            store.index,
            store.lock,
            store.counters,
            self._loop,
            self.watch,
        )

    def _count(self, read: int, padding: int) -> None:
        self._store.counters.add(bytes_read=read, bytes_padding=padding)
