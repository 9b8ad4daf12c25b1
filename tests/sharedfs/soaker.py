"""One process of the soak: `python -m tests.sharedfs.soaker URL BOARD RECORD PROCESS LIFE END POLL`.

Saves blocks and says so on the board, a file that all processes append a line to; reads what others have saved and
compares every byte; lets its own devices fail. Everything that it does is a line of JSON in its record, written at
once, so that a kill loses nothing. END is a moment of the machine's monotonic clock.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rewarm.errors import StorageError
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import READ, SYNC, WRITE, Device
from rewarm.store.file import FileStore
from rewarm.store.opening import open_store
from rewarm.testing import FaultyDevice, make_keys, payload
from rewarm.testing.faulty import Fault, Kind, bit_flip, failure, late, short, stall, torn_write

BATCH_BLOCKS = 6
BLOCK_BYTES = 48 << 10
WAIT_S = 30.0
"""A caller's own time-out, which bounds every verdict whatever hangs."""

INTERVALS = 2
"""A batch that was visible for so many intervals, and is still, is due."""

PAUSE_S = (0.3, 1.2)
FAULT_CHANCE = 0.1
LOOKED_AT_MAX = 30
KNOWN_MAX = 400
RETRY_S = 1.0

FAULTS: list[tuple[str, Fault, int | None]] = [
    ("EIO on a read", failure(errno.EIO), READ),
    ("ESTALE on a read", failure(errno.ESTALE), READ),
    ("a flipped bit", bit_flip(), READ),
    ("a stalled read", stall(), READ),
    ("ENOSPC", failure(errno.ENOSPC), WRITE),
    ("EIO on a write", failure(errno.EIO), WRITE),
    ("a torn write", torn_write(errno.EIO), WRITE),
    ("a stalled write", stall(), WRITE),
    ("EIO on a sync", failure(errno.EIO), SYNC),
    ("a short transfer", short(), None),
    ("a late transfer", late(0.5), None),
]


def batch_keys(batch: str) -> list[bytes]:
    """Keys of one batch, named `process.life.number`."""
    return make_keys(BATCH_BLOCKS, batch)


class Soaker:
    """One process at work on one open store."""

    def __init__(self, url: str, board: Path, record: Path, process: int, life: int, interval_s: float) -> None:
        self.dice = random.Random(f"{process} {life}")
        self.devices: list[FaultyDevice] = []
        self.interval_s = interval_s
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._writing = os.open(board, os.O_WRONLY | os.O_APPEND)
        self._reading = open(board)  # noqa: SIM115 for the life of the process
        self._name, self._number = f"{process}.{life}", 0
        self._visible: dict[str, float | None] = {}
        store = open_store(url, namespace="soak", device_wrapper=self._wrap, write_device_wrapper=self._wrap)
        assert isinstance(store, FileStore)
        self.store = store

    def _wrap(self, device: Device) -> Device:
        self.devices.append(FaultyDevice(device, seed=self.dice.randrange(1 << 30)))
        return self.devices[-1]

    def note(self, verb: str, start_s: float, **facts: object) -> None:
        """A line of the record."""
        line = json.dumps({"verb": verb, "start": start_s, "end": time.monotonic(), **facts})
        os.write(self._record, line.encode() + b"\n")

    def turn(self) -> None:
        """Do one thing, let something fail, pause."""
        if self.dice.random() < FAULT_CHANCE:
            self.misbehave()
        (verb,) = self.dice.choices([self.save, self.read, self.evict], [40, 58, 2])
        self.guarded(verb)
        self.look()
        for device in self.devices:
            if self.dice.random() < 0.5:
                device.release_stalled()
        time.sleep(self.dice.uniform(*PAUSE_S))

    def guarded(self, verb: Callable[[], None]) -> None:
        """Nothing on the data path may raise; what looks after a pool may say that the medium failed."""
        start_s = time.monotonic()
        try:
            verb()
        except StorageError as error:
            kind = "refused" if verb == self.evict else "failure"
            self.note(kind, start_s, what=str(error))
        except Exception:  # noqa: BLE001 the soak is to find them
            self.note("failure", start_s, what=traceback.format_exc())

    def misbehave(self) -> None:
        """Have one of the next operations fail."""
        name, fault, opcode = self.dice.choice(FAULTS)
        device = self.devices[1 if opcode in (WRITE, SYNC) else 0]
        device.next(fault, opcode=opcode)
        self.note("fault", time.monotonic(), what=name)

    def save(self) -> None:
        """Save a batch of one's own, and tell the others."""
        batch, start_s, before = f"{self._name}.{self._number}", time.monotonic(), self._writer_id()
        stalled = self._stalled_writes()
        self._number += 1
        keys = batch_keys(batch)
        transfer = self.store.save(keys, [payload(key, BLOCK_BYTES) for key in keys])
        called_s = time.monotonic()
        good = transfer.wait(WAIT_S)
        self.note(
            "save",
            start_s,
            called=called_s,
            outcomes=Counter(map(str, transfer.outcomes)),
            late=before is not None and self._writer_id() != before,
            stalled=self._stalled_writes() > stalled,
            evicted_segments=self.store.stats().evicted_segments,
        )
        if all(good):
            os.write(self._writing, f"{batch}\n".encode())

    def _writer_id(self) -> str | None:
        """The writer that this process writes under now; a late one is left for another."""
        writer = self.store._writes.appender.writer
        return writer.id if writer else None

    def _stalled_writes(self) -> int:
        """Writes and syncs that were made to stall so far."""
        return self.devices[1].injected[Kind.STALL]

    def look(self) -> None:
        """Which batches of the board are visible here, and since when."""
        for line in self._reading:
            if line.endswith("\n"):
                self._visible[line.strip()] = None
        while len(self._visible) > KNOWN_MAX:
            del self._visible[next(iter(self._visible))]
        for batch in self.dice.sample(sorted(self._visible), min(LOOKED_AT_MAX, len(self._visible))):
            held = self.store.lookup(batch_keys(batch)).mask.all()
            self._visible[batch] = (self._visible[batch] or time.monotonic()) if held else None

    def read(self) -> None:
        """Load a batch that is due, if there is one, and compare every byte."""
        now_s = time.monotonic()
        due = [b for b, since in self._visible.items() if since and since + INTERVALS * self.interval_s <= now_s]
        if not due:
            return
        batch = self.dice.choice(due)
        keys = batch_keys(batch)
        if not self.store.lookup(keys).mask.all():
            self._visible[batch] = None
            return
        with self.store.lock:
            slots = self.store.index.places(keys).segment.tolist()
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        transfer = self.store.load(keys, buffers)
        called_s = time.monotonic()
        transfer.wait(WAIT_S)
        end_s = time.monotonic()
        outcomes = transfer.outcomes
        wrong = sum(
            outcome is Outcome.HIT and buffer != payload(key, BLOCK_BYTES)
            for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True)
        )
        missed = [slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome is not Outcome.HIT]
        evicted = self._announced_evicted(missed) if missed else 0
        counts = Counter(map(str, outcomes))
        self.note("load", now_s, called=called_s, verdict=end_s, outcomes=counts, wrong=wrong, evicted=evicted)

    def _announced_evicted(self, slots: list[int]) -> int:
        """How many of these misses lay in segments whose eviction somebody has announced, as a refresh shows."""
        try:
            self.store.refresh()
        except StorageError:
            return 0
        return sum(self.store.segments[slot].gone for slot in slots)

    def evict(self) -> None:
        """Make some room, as an administrator would."""
        start_s = time.monotonic()
        self.note("evict", start_s, freed=self.store.evict(self.store.stats().capacity_bytes * 7 // 8))


def main() -> None:
    """Open, work until the end, close."""
    url, board, record, process, life, end, interval = sys.argv[1:]
    soaker = None
    while soaker is None:
        if time.monotonic() > float(end):
            return
        try:
            soaker = Soaker(url, Path(board), Path(record), int(process), int(life), float(interval))
        except StorageError:  # the mount is cut off or hangs
            time.sleep(RETRY_S)
    while time.monotonic() < float(end):
        soaker.turn()
    for device in soaker.devices:
        device.heal()
        device.release_stalled()
    start_s = time.monotonic()
    soaker.store.close()
    stats = soaker.store.stats()
    soaker.note("close", start_s, notes=stats.notes, unreleased=stats.unreleased_bytes, queued=stats.queued_bytes)


if __name__ == "__main__":
    main()
