"""The I/O process itself: a `ReadLoop` of its own, without an index, that is told what to read and where to.

It gives a verdict for every block and, apart from it, the release of the memory. It never looks for another copy: what
it could not read the engine's process reads again, with all its retries. It ends with the engine's process, leaves
signals for people and supervisors to that process, and knows nothing that outlives it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import StorageError
from rewarm.store.buffers import Borrowed, address_of
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import LADDER
from rewarm.store.index import Places
from rewarm.store.loop import Errand
from rewarm.store.pool import open_regular
from rewarm.store.process import wire
from rewarm.store.process.arena import map_part
from rewarm.store.process.wire import Message, Table
from rewarm.store.process.witness import bear_witness
from rewarm.store.reading import ReadLoop
from rewarm.store.requests import Failure, LoadJob
from rewarm.store.segments import FileCache
from rewarm.store.transfer import BatchTransfer, Counters

IDLE_S = 1.0
"""After so long without a load files that are open are closed: nothing keeps the bytes of what was evicted."""

_END_S = 5.0
"""How long an orderly end waits for reads in the kernel; after it the process ends all the same."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's process decides: the device, how files are opened, and what proves that reads have ended.

    `token` 0: reads go to memory of our own, and need no proof.
    """

    device: str
    depth: int
    alignment: int
    always_bounce: bool
    io_deadline_s: float
    flags: int
    token: int
    parent: int
    channel: int = -1
    tables: int = -1


class Side:
    """What the read loop asks of its store."""

    def __init__(self, terms: Terms) -> None:
        self._token = terms.token
        self.files = FileCache(terms.flags, opener=self._open_file)
        self.counters = Counters()
        self.alignment = terms.alignment
        self.always_bounce = terms.always_bounce
        self.io_deadline_s = terms.io_deadline_s
        self.paths: dict[int, Path] = {}

    def _open_file(self, path: Path, flags: int) -> int:
        descriptor = open_regular(path, flags)
        if self._token:
            try:
                bear_witness(descriptor, self._token)
            except OSError:  # no locks here: then it cannot be read by us, and the engine's thread does it
                os.close(descriptor)
                raise
        return descriptor

    def path_of(self, slot: int) -> Path:
        """Path of a segment."""
        return self.paths[slot]

    def next_place(self, key: bytes, slot: int, offset: int, failure: Failure, attempt: int) -> Places | None:
        """The engine's process alone knows other copies."""
        return None


class Verdicts(BatchTransfer):
    """Verdicts of some rows of a table, written where the engine's process sees them."""

    def __init__(self, table: Table, start: int, end: int, counters: Counters, wake: Callable[[], None]) -> None:
        super().__init__(end - start, counters, loading=True, wake=wake)
        self._codes = table.code[start:end]


class Load:
    """One load of the engine: the parts of it that have come so far."""

    def __init__(self, number: int, table: Table) -> None:
        self.number = number
        self.table = table
        self.parts: list[Verdicts] = []
        self.whole = False
        self.told = False

    def first_verdict_s(self) -> float:
        """Monotonic time of the first verdict, 0 before it."""
        return min((part.first_verdict_at for part in self.parts if part.first_verdict_at), default=0.0)


class TellingLoop(ReadLoop):
    """The read loop, which tells at the end of each turn what is over."""

    def __init__(self, side: Side, device: Device, tell: Callable[[Message], None], broken: Callable[[], None]) -> None:
        super().__init__(side, device)
        self.loads: dict[int, Load] = {}
        self._counters = side.counters
        self._told_bytes = (0, 0)
        self._tell = tell
        self._on_broken = broken

    def tidy(self, now_s: float) -> None:
        """See `IoLoop.tidy`; then tell."""
        super().tidy(now_s)
        for load in list(self.loads.values()):
            self._report(load)

    def _report(self, load: Load) -> None:
        if not load.whole or not all(part.done() for part in load.parts):
            return
        released = all(part.released() for part in load.parts)
        if released or not load.told:
            load.told = True
            load.table.first_verdict_s[0] = load.first_verdict_s()
            now = (self._counters.bytes_read, self._counters.bytes_padding)
            read, padding = (new - old for new, old in zip(now, self._told_bytes, strict=True))
            self._told_bytes = now
            if released:
                del self.loads[load.number]
            self._tell(Message(wire.OVER, load.number, int(released), read, padding))

    def _break(self, why: str) -> None:
        super()._break(why)
        self.tidy(0.0)
        self._on_broken()


class Child:
    """Serves one engine over its end of the channel, until that closes. `serve` runs in the calling thread."""

    def __init__(self, channel: socket.socket, tables: mmap.mmap, terms: Terms) -> None:
        self._channel = channel
        self._tables = np.frombuffer(tables, np.uint8)
        self._terms = terms
        self._arenas: list[tuple[int, npt.NDArray[np.uint8]]] = []
        self._side = Side(terms)
        device = LADDER[terms.device](terms.depth)
        self._loop = TellingLoop(self._side, device, self._tell, lambda: channel.shutdown(socket.SHUT_RDWR))

    def serve(self) -> bool:
        """Do what messages say until the channel ends; False when reads had to be left behind in the kernel."""
        self._tell(Message(wire.HELLO, 1))
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        parent = self._watch_parent(poller)
        try:
            while True:
                ready = dict(poller.poll(IDLE_S * 1000))
                if parent in ready:
                    return False
                if not ready:
                    if not self._loop.loads:
                        self._side.files.close()
                elif not self._take():
                    return self._end()
        finally:
            if parent >= 0:
                os.close(parent)

    def _watch_parent(self, poller: select.poll) -> int:
        """A descriptor that becomes readable when the engine's process ends, -1 on Linux before 5.3: a process that it
        has forked may keep the channel open."""
        if self._terms.parent == os.getpid():  # in a test
            return -1
        try:
            parent = os.pidfd_open(self._terms.parent)
        except OSError:
            return -1
        poller.register(parent, select.POLLIN)
        return parent

    def _take(self) -> bool:
        """One message; False at the end."""
        try:
            datagram, descriptors, _, _ = socket.recv_fds(self._channel, wire.PAYLOAD_MAX, 1)
        except OSError:
            return False
        if not datagram:
            return False
        message = wire.unpack(datagram)
        if message.kind == wire.LOAD:
            self._load(message)
        elif message.kind == wire.CANCEL:
            load = self._loop.loads.get(message.number)
            for part in load.parts if load else ():
                part.cancel()
        elif message.kind == wire.NAME:
            self._side.paths[message.number] = Path(os.fsdecode(message.payload))
        elif message.kind == wire.FORGET:
            self._side.files.forget(Path(os.fsdecode(message.payload)))
        elif message.kind == wire.PING:
            self._loop.put(Errand(lambda device: self._pong(message.number)))
        elif message.kind == wire.ARENA:
            self._add_arena(message, descriptors[0])
        return True

    def _pong(self, number: int) -> int:
        self._tell(Message(wire.PONG, number))
        return 0

    def _add_arena(self, message: Message, descriptor: int) -> None:
        """Map an arena, `a` bytes from `b` on, and pin it."""
        try:
            arena, no_huge_pages = map_part(descriptor, message.b, message.a)
        except StorageError as error:
            self._tell(Message(wire.ARENA_READY, message.number, payload=str(error).encode()))
            return
        finally:
            os.close(descriptor)
        start = address_of(arena)
        self._arenas.append((start, arena))
        pinned = self._loop.register(start, len(arena))
        notes = [*self._loop.device_notes(), *([no_huge_pages] if no_huge_pages else [])]
        self._tell(Message(wire.ARENA_READY, message.number, pinned, start, payload="; ".join(notes).encode()))

    def _load(self, message: Message) -> None:
        """Rows `c` to `d` of the table of `b` rows at `a`; the payload says when no more will come."""
        start, end = message.c, message.d
        load = self._loop.loads.get(message.number)
        if load is None:
            load = Load(message.number, Table(self._tables, message.a, message.b))
            self._loop.loads[message.number] = load
        if end > start:
            part = Verdicts(load.table, start, end, self._side.counters, self._loop.wake)
            load.parts.append(part)
            if not self._loop.put(self._job(load.table, part, start, end)):
                part.settle(range(end - start), Outcome.LOST_MEDIUM, releasing=True)
        load.whole = message.payload == wire.LAST
        self._loop.wake()

    def _job(self, table: Table, part: Verdicts, start: int, end: int) -> LoadJob:
        addresses, lengths = table.address[start:end], table.length[start:end]
        rows = np.arange(end - start)
        borrowed = Borrowed(self._views(addresses.tolist(), lengths.tolist()), addresses, lengths)
        places = Places(
            rows,
            table.segment[start:end].copy(),
            table.offset[start:end].copy(),
            lengths,
            table.checksum[start:end].tolist(),
        )
        return LoadJob(part, [b""] * len(rows), borrowed, places, rows)

    def _views(self, addresses: list[int], lengths: list[int]) -> list[npt.NDArray[np.uint8]]:
        views: list[npt.NDArray[np.uint8]] = []
        start, arena = 0, self._tables[:0]
        for address, length in zip(addresses, lengths, strict=True):
            if not start <= address < start + len(arena):
                start, arena = next((at, one) for at, one in self._arenas if at <= address < at + len(one))
            views.append(arena[address - start : address - start + length])
        return views

    def _end(self) -> bool:
        self._loop.cancel_all()
        ended = self._loop.stop(_END_S)
        self._side.files.close()
        return ended

    def _tell(self, message: Message) -> None:
        try:
            self._channel.send(message.packed(), socket.MSG_NOSIGNAL)
        except OSError:  # the engine has gone; the main thread sees it, too
            return


def main(text: str) -> None:
    """Serve by these terms (JSON), and end the process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when it ends; we end with it
    ctypes.CDLL(None).prctl(15, b"rewarm-io", 0, 0, 0)  # PR_SET_NAME, for ps and top
    terms = msgspec.json.decode(text, type=Terms)
    channel = socket.socket(fileno=terms.channel)
    try:
        child = Child(channel, mmap.mmap(terms.tables, wire.TABLES_BYTES), terms)
    except (StorageError, OSError, ValueError) as error:
        channel.send(Message(wire.HELLO, 0, payload=str(error).encode()).packed())
        os._exit(1)
    os._exit(0 if child.serve() else 1)  # without waiting for threads that hang in the kernel
