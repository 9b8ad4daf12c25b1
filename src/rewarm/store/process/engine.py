"""The engine's side of an I/O process: starts it, hands loads over, gives their verdicts, and survives its end.

A load is handed over by the caller's thread, in steps that keep the interpreter lock; one message answers it. What the
process could not read, and what it had not read when it ended, is read again by the engine's own thread, but only when
nothing of it can be in the kernel any more: after the release, or, where the process has died, once its files are
provably out of use (see `witness`). Until then the memory stays borrowed. A process that answers nothing (a stopped
one) settles nothing: the deadline here gives the verdicts.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from rewarm.errors import StorageError
from rewarm.store.buffers import Held
from rewarm.store.contract import Outcome
from rewarm.store.devices import kernel
from rewarm.store.loop import Errand
from rewarm.store.patience import Watch
from rewarm.store.process import wire
from rewarm.store.process.child import Terms
from rewarm.store.process.remote import RemoteLoad, Span
from rewarm.store.process.spawn import how_it_ended, spawn
from rewarm.store.process.wire import STEP_ROWS, Message, Table, table_bytes
from rewarm.store.process.witness import in_use
from rewarm.store.space import Space
from rewarm.store.transfer import BatchTransfer

log = logging.getLogger("rewarm.store")

START_S = 20.0
"""How long the interpreter may take to start, on a loaded machine."""

PIN_BYTES_PER_S = 256 << 20
"""No machine that we know takes longer to fault in and pin an arena."""

LOOK_S = 1.0
"""Longest time between two looks at deadlines."""

PROOF_S = 0.02
"""Between two looks whether a dead process's reads have left the kernel."""

BATCH_ROWS = 4096
"""Rows handed over at once, after the first step, which goes at once."""

_live: weakref.WeakSet[IoProcess] = weakref.WeakSet()


def _leave_in_fork() -> None:
    for process in list(_live):
        process.drop_in_fork()


os.register_at_fork(after_in_child=_leave_in_fork)


class IoProcess:
    """Made running. `over` gets each load at its end, with the blocks to read again, in a thread of ours.

    Raises `StorageError` when it does not start.
    """

    def __init__(
        self,
        terms: Terms,
        path_of: Callable[[int], Path],
        over: Callable[[RemoteLoad, list[int]], None],
        count: Callable[[int, int], None],
    ) -> None:
        self.ended = ""
        self.arenas: list[Span] = []
        """Memory that it reads into, in order."""
        self._terms = terms
        self._path_of = path_of
        self._over = over
        self._count = count
        self._lock = threading.RLock()
        self._loads: dict[int, RemoteLoad] = {}
        self._named: set[int] = set()
        self._outbox: deque[bytes] = deque()
        self._answers: dict[int, Future[Message]] = {}
        self._pings: dict[int, Errand] = {}
        self._number = 0
        self._stopping = False
        self._space = Space(wire.TABLES_BYTES)
        self._watch = Watch(self, terms.io_deadline_s)
        self._event = kernel.open_eventfd()
        self._tables_fd = os.memfd_create("rewarm-tables", os.MFD_CLOEXEC)
        os.ftruncate(self._tables_fd, wire.TABLES_BYTES)
        self._tables = np.frombuffer(mmap.mmap(self._tables_fd, wire.TABLES_BYTES), np.uint8)
        self._channel, other = wire.pair()
        self._hello: Future[Message] = Future()
        try:
            self._child = spawn(terms, other, self._tables_fd)
        except StorageError:
            self._channel.close()
            os.close(self._event)
            raise
        finally:
            other.close()
            os.close(self._tables_fd)
        self._thread = threading.Thread(target=self._run, name="rewarm-answers", daemon=True)
        self._thread.start()
        _live.add(self)
        self._wait_for_hello()

    # Its beginning.

    def _wait_for_hello(self) -> None:
        try:
            hello = self._hello.result(START_S)
        except (TimeoutError, StorageError) as error:
            self.stop(0.0)
            raise StorageError(f"the I/O process does not start: {error or 'it says nothing'}") from error
        if not hello.number:
            self.stop(0.0)
            raise StorageError(f"the I/O process does not start: {hello.payload.decode()}")

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._child.pid

    def add_arena(self, address: int, length: int, descriptor: int, offset: int) -> tuple[int, str]:
        """Have it map and pin shared memory; bytes pinned, and what the kernel said. Raises `StorageError`."""
        number, answer = self.new_number(), Future[Message]()
        self._answers[number] = answer
        message = Message(wire.ARENA, number, length, offset)
        try:
            with self._lock:
                socket.send_fds(self._channel, [message.packed()], [descriptor], socket.MSG_DONTWAIT)
            found = answer.result(START_S + length / PIN_BYTES_PER_S)
        except (OSError, StorageError) as error:  # TimeoutError is an OSError
            raise StorageError(f"the I/O process cannot map the arena: {error or 'it does not answer'}") from error
        finally:
            self._answers.pop(number, None)
        if not found.b:
            raise StorageError(f"the I/O process cannot map the arena: {found.payload.decode()}")
        self.arenas = sorted([*self.arenas, Span(address, address + length, found.b - address)])
        return found.a, found.payload.decode()

    # Loads.

    def begin(self, number: int, transfer: BatchTransfer, keys: list[bytes], held: Held) -> RemoteLoad | None:
        """A load with a table; None while there is no room for one, or the process does not answer any more."""
        with self._lock:
            usable = not (self.ended or self._stopping or self.silent())
            at = self._space.take(table_bytes(len(keys))) if usable else None
            if at is None:
                return None
            load = RemoteLoad(number, transfer, keys, held, Table(self._tables, at, len(keys)))
            self._loads[number] = load
        self._watch.add(transfer)
        return load

    def send(self, load: RemoteLoad, *, last: bool) -> None:
        """Hand over the rows that were added: at once those of the first step, later many together, and the last.

        After the last one the load is ours.
        """
        start, end = load.sent, len(load.blocks)
        if not last and start and end - start < BATCH_ROWS:
            return
        with self._lock:
            load.sealed = last
            if last and not end:
                self._remove(load)
            elif not self.ended:
                load.sent = end
                self._name(load, start, end)
                table, payload = load.table, wire.LAST if last else b""
                self._post(Message(wire.LOAD, load.number, table.at, table.rows, start, end, payload))

    def _name(self, load: RemoteLoad, start: int, end: int) -> None:
        """Tell the paths of segments that it does not know."""
        slots: set[int] = set()
        for at in range(start, end, STEP_ROWS):
            slots.update(load.table.segment[at : min(at + STEP_ROWS, end)].tolist())
        for slot in slots - self._named:
            self._named.add(slot)
            self._post(Message(wire.NAME, slot, payload=os.fsencode(self._path_of(slot))))

    def _remove(self, load: RemoteLoad) -> None:
        with self._lock:
            del self._loads[load.number]
            self._space.give(load.table.at, table_bytes(load.table.rows))

    def cancel(self, number: int) -> None:
        """What the process has not begun of a load is dropped."""
        with self._lock:
            load = self._loads.get(number)
            if load is not None and not load.cancelled and not self.ended:
                load.cancelled = True
                self._post(Message(wire.CANCEL, number))

    def forget(self, path: Path) -> None:
        """A file is gone: the process closes it, at once or with its last reader."""
        with self._lock:
            if not self.ended:
                self._post(Message(wire.FORGET, payload=os.fsencode(path)))

    def put(self, errand: Errand) -> bool:
        """For `Watch`: a sign of life from the process's loop. Only errands that say nothing more are possible."""
        with self._lock:
            if self.ended:
                return True  # never answered: whoever waits for a dead process's memory gets a verdict in time
            number = self.new_number()
            self._pings = {number: errand}
            self._post(Message(wire.PING, number))
            return True

    def silent(self) -> bool:
        """True while it has not answered in time."""
        return self._watch.overdue()

    def outstanding(self) -> int:
        """Loads whose memory the process may still write to."""
        return len(self._loads)

    def new_number(self) -> int:
        """A number for a load."""
        with self._lock:
            self._number = self._number % 0xFFFFFFFF + 1
            return self._number

    def _post(self, message: Message) -> None:
        """Send in order, without waiting and with the interpreter lock kept. Under the lock."""
        datagram = message.packed()
        with contextlib.suppress(OSError):  # it has gone: our thread sees that, too
            if not self._outbox and wire.send_now(self._channel.fileno(), datagram):
                return
            self._outbox.append(datagram)
            kernel.hold_eventfd_write(self._event)

    # Answers, in a thread of ours.

    def _run(self) -> None:
        try:
            self._answer_until_the_end()
        finally:  # also after a defect of ours: nobody waits for answers that nobody takes
            self._child.kill()
            self._bury()

    def _answer_until_the_end(self) -> None:
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._event, select.POLLIN)
        room = ctypes.create_string_buffer(wire.PAYLOAD_MAX)
        look_s = min(LOOK_S, self._terms.io_deadline_s / 4)
        looked_s = time.monotonic()
        while True:
            events = select.POLLIN | (select.POLLOUT if self._outbox else 0)
            poller.modify(self._channel, events)
            ready = dict(poller.poll(look_s * 1000))
            if self._event in ready:
                os.eventfd_read(self._event)
            if not self._take_all(room):
                return
            with self._lock, contextlib.suppress(OSError):
                while self._outbox and wire.send_now(self._channel.fileno(), self._outbox[0]):
                    self._outbox.popleft()
            if time.monotonic() - looked_s >= look_s:
                looked_s = time.monotonic()
                self._look()

    def _look(self) -> None:
        self._watch.look()
        for load in list(self._loads.values()):
            if load.transfer.done():
                self.cancel(load.number)

    def _take_all(self, room: ctypes.Array[ctypes.c_char]) -> bool:
        """Every message that is there; False at the end of the channel."""
        while True:
            try:
                datagram = wire.receive_now(self._channel.fileno(), room)
            except OSError:
                return False
            if datagram is None:
                return True
            if not datagram:
                return False
            self._take(wire.unpack(datagram))

    def _take(self, message: Message) -> None:
        if message.kind == wire.OVER:
            self._count(message.b, message.c)
            load = self._loads.get(message.number)
            if load is not None and message.a:
                self._close(load)
            elif load is not None:
                load.settle()
        elif message.kind == wire.PONG:
            errand = self._pings.pop(message.number, None)
            if errand is not None:
                errand.future.set_result(0)
        elif message.kind == wire.ARENA_READY:
            answer = self._answers.get(message.number)
            if answer is not None:
                answer.set_result(message)
        elif message.kind == wire.HELLO:
            self._hello.set_result(message)

    def _close(self, load: RemoteLoad) -> None:
        """The process has let go of a load: verdicts, and its memory or what is left of it to read."""
        rest = load.settle()
        self._remove(load)
        self._over(load, rest)

    # Its end.

    def _bury(self) -> None:
        """The channel has ended, so none of its instructions run any more. What it had goes on here, once it may."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(LOOK_S)
        with self._lock:
            code = self._child.poll()
            self.ended = f"the I/O process has ended ({how_it_ended(code)}); the store reads by its own thread"
            self._outbox.clear()
            waiting = [self._hello, *self._answers.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(StorageError(self.ended))
        if not self._stopping:
            log.error("%s", self.ended)
        while self._loads:
            for load in [load for load in list(self._loads.values()) if load.sealed]:
                load.settle()
                if not self._may_still_read(load):
                    self._close(load)
            self._watch.look()
            time.sleep(PROOF_S if self._loads else 0)

    def _may_still_read(self, load: RemoteLoad) -> bool:
        """True while a read of the dead process may be in the kernel. Unknown is for ever: its memory stays borrowed.

        Then what has no verdict gets one now.
        """
        if not self._terms.token:
            return False
        try:
            return any(in_use(self._path_of(slot), self._terms.token) for slot in load.unread_segments())
        except OSError:
            load.transfer.settle(load.transfer.pending(), Outcome.LOST_MEDIUM)
            return True

    def stop(self, timeout_s: float) -> bool:
        """End it, seconds; False when memory had to be left behind with it."""
        self._stopping = True
        for load in list(self._loads.values()):
            load.transfer.cancel()
            self.cancel(load.number)
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._child.kill()
            self._thread.join(LOOK_S)
        if self._thread.is_alive():
            return False
        _live.discard(self)
        self._tables = self._tables[:0].copy()
        self._channel.close()
        os.close(self._event)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(LOOK_S)
        return True

    def drop_in_fork(self) -> None:
        """In a forked process: hold nothing that keeps the I/O process alive."""
        with contextlib.suppress(OSError):
            os.close(self._channel.detach())
            os.close(self._event)
