"""The owner of a raw pool: appends blocks and frames, seals, evicts, rolls the log from one half to the other.

One object per device and process, shared by all its handles. Whoever saves or frees slots holds its lock, and nobody
else waits for it; it is not held while a slot rests. A slot is used again only after the grace period that the polls of
readers imply. Before each frame the owner makes sure that less than half its lease has passed: a process that was
stopped publishes nothing more, and what it has in flight lies in a half, or under a writer id, that no reader takes.
Raises `OSError` from everything that touches the medium, within the medium's deadline.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.store.layout import (
    PAGE,
    REFERENCES_PER_FRAME,
    SEGMENT_GONE,
    Frame,
    Kind,
    decode_frame,
    encode_counter,
    encode_frame,
    encode_open,
    entries_per_frame,
    pages,
)
from rewarm.store.raw.header import HEADER_OFFSETS, Header, encode_header
from rewarm.store.raw.layout import encode_slot_header, encode_slot_reference, slot_generation
from rewarm.store.raw.lease import NOBODY, Tenure
from rewarm.store.raw.media import Media
from rewarm.store.raw.slots import LogTail, Slot, SlotTable, read_header

COUNT_SHARE = 6
LATE_SHARE = 2
GRACE_POLLS = 2
"""A reader that polls learns of an eviction within one poll; the second is for what it has in flight."""

FREE_MIN_SHARE = 20
FREE_AIM_SHARE = 10
"""Eviction starts when a twentieth of the slots is free, and ends at a tenth: the marks of file pools."""

SNAPSHOT_SHARE = 0.75
"""A new log half begins with at most so much of it; the oldest blocks go where more would be needed."""

SYNC_BYTES = 64 << 20
CLOSE_S = 5.0


class LostOwnership(OSError):
    """Another host has taken the pool over, or this process was stopped for too long."""

    def __init__(self) -> None:
        super().__init__(errno.ESTALE, "this process no longer owns the pool")


class Owner:
    """See the module. `tenure` is what `acquire` returned."""

    def __init__(self, media: Media, tenure: Tenure, *, grace_s: float) -> None:
        self.media = media
        self.header = tenure.header
        self.reservation = tenure.reservation
        self.grace_s = grace_s
        self.lock = threading.RLock()
        self.lost = False
        self.pins: dict[tuple[int, int], int] = {}
        self.pin_lock = threading.Lock()
        self.bytes_log = 0
        self.evicted_slots = 0
        self._counted_s = tenure.since_s
        self._open: dict[bytes, Slot] = {}
        self._unsynced = 0
        self._freed_s: dict[int, float] = {}
        self.table = SlotTable(self.header)
        self._sequence, self._at = 0, 0
        self._hole = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_counting, name="rewarm-raw-lease", daemon=True)
        self._thread.start()  # First: a long log takes longer than half a lease to read.
        try:
            self._replay()
            with self.lock:
                self._roll()
        except OSError:
            self.lost = True
            self._stop.set()
            raise

    def _replay(self) -> None:
        LogTail(self.media, self.header.pool_id, self._replayed, lambda _: None).refresh()
        for slot in self.table.used.values():
            slot.sealed = True  # Nobody appends to it any more.
        now_s = time.monotonic()
        self._freed_s = {number: now_s for number in self.table.generations if number not in self.table.used}

    def _replayed(self, frame: Frame) -> None:
        self.table.apply(frame)

    # Life.

    @property
    def used_bytes(self) -> int:
        """Slots in use, whole."""
        return len(self.table.used) * self.header.slot_bytes

    def late(self) -> bool:
        """True when others may soon take this owner for dead, or have."""
        return self.lost or time.monotonic() - self._counted_s >= self.header.lease_ms / 1000 / LATE_SHARE

    def _own_still(self) -> None:
        """Raise `LostOwnership` where others may take this owner for dead: it writes nothing more."""
        if self.late():
            self.lost = True
            raise LostOwnership

    def count(self) -> None:
        """Say that this owner lives, unless somebody else has become it."""
        with self.lock:
            if self.late():
                self.lost = True
                return
            self._write_header(msgspec.structs.replace(self.header, counter=self.header.counter + 1))

    def _write_header(self, header: Header) -> None:
        began_s = time.monotonic()
        if not self.answers():
            self.lost = True
            raise LostOwnership
        self._own_still()  # The look may have taken long, and what went before it.
        self.media.write(HEADER_OFFSETS[header.counter % 2], encode_header(header))
        self.header = self.table.header = header
        self._counted_s = began_s

    def answers(self) -> bool:
        """True when the medium says that this owner owns it. Raises `OSError`."""
        found = read_header(self.media)
        return found is not None and found.owner == self.header.owner

    def look(self) -> None:
        """Ask whether the medium that is open here still says that the pool is this owner's; if not, it is lost."""
        try:
            self.lost = self.lost or not self.answers()
        except OSError:
            self.lost = True

    def _keep_counting(self) -> None:
        while not self._stop.wait(self.header.lease_ms / 1000 / COUNT_SHARE) and not self.lost:
            with contextlib.suppress(OSError):
                self.count()

    def close(self) -> None:
        """Let go of the pool: others need not wait for the lease."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive() and self.lock.acquire(timeout=CLOSE_S):
            with contextlib.suppress(OSError):
                self._say_goodbye()
            self.lock.release()
        self.lost = True  # Where the medium does not answer the lease runs out by itself.
        self.media.close()

    def _say_goodbye(self) -> None:
        if not self.late():
            self.media.sync()
            self._write_header(
                msgspec.structs.replace(self.header, counter=self.header.counter + 1, owner=NOBODY, node="")
            )
            self.media.sync()
            self.reservation.release()

    # The log.

    def _append(self, kind: Kind, records: bytes, count: int, namespace: bytes = bytes(32), key_bytes: int = 0) -> None:
        """Write one frame; rolls before it where the half is full."""
        self._own_still()
        if self._at + pages(len(records) + 2 * PAGE) > self.header.half_bytes:
            self._roll()
        self._write_frame(self._frame(self.header, kind, records, count, namespace, key_bytes))

    def _frame(
        self,
        header: Header,
        kind: Kind,
        records: bytes,
        count: int,
        namespace: bytes = bytes(32),
        key_bytes: int = 0,
    ) -> bytes:
        self._sequence += 1
        return encode_frame(
            kind, header.epoch, self._sequence, header.writer, records, count, namespace=namespace, key_bytes=key_bytes
        )

    def _write_frame(self, data: bytes) -> None:
        at, self._at = self._at, self._at + len(data)  # After a failed write the offset moves on.
        hole, self._hole = self._hole, True
        self.media.write(self.header.half_offset(self.header.epoch) + at, data)
        self._hole = False
        if hole:
            self.count()  # So that readers look behind the damage now.
        self.bytes_log += len(data)
        frame = decode_frame(memoryview(data))
        assert frame is not None
        self.table.apply(frame)

    def _roll(self) -> None:
        """Begin the other half with a snapshot; it is on the medium before the header says that it counts.

        It may take long: the owner goes on counting, and writes nothing more once it is late. A roll that fails leaves
        the header as it is, and the half that counts.
        """
        fresh = msgspec.structs.replace(self.header, epoch=self.header.epoch + 1, writer=secrets.token_bytes(16))
        start, at = fresh.half_offset(fresh.epoch), 0
        for frame in self._snapshot(fresh):
            if time.monotonic() - self._counted_s > self.header.lease_ms / 1000 / COUNT_SHARE:
                self.count()
            self._own_still()
            self.media.write(start + at, frame)
            at += len(frame)
        self.media.sync()
        self._write_header(msgspec.structs.replace(fresh, counter=self.header.counter + 1))
        self.media.sync()
        self._at = at
        self.bytes_log += at

    def _snapshot(self, fresh: Header) -> list[bytes]:
        """Frames that say all that counts; what does not fit is forgotten, oldest first."""
        while True:
            frames = list(self._snapshot_frames(fresh))
            if sum(map(len, frames)) <= self.header.half_bytes * SNAPSHOT_SHARE or not self.table.used:
                return frames
            oldest = min(self.table.used.values(), key=lambda slot: slot.order)
            self._forget(oldest)

    def _snapshot_frames(self, header: Header) -> Iterator[bytes]:
        yield self._frame(header, Kind.OPEN, encode_open(header.pool_id, header.capacity_bytes, header.slot_bytes), 1)
        yield self._frame(header, Kind.COUNTER, encode_counter(header.lease_ms / 1000), 1)
        references: dict[Kind, list[bytes]] = {Kind.EVICTED: [], Kind.SEALED: [], Kind.DROPPED: []}
        for number, generation in self.table.generations.items():
            if number not in self.table.used:
                references[Kind.EVICTED].append(encode_slot_reference(header.writer, number, generation, SEGMENT_GONE))
        for slot in sorted(self.table.used.values(), key=lambda slot: slot.order):
            slot.entries = _joined(slot.entries)
            for key_bytes, entries in slot.entries:
                for start in range(0, len(entries), entries_per_frame(key_bytes)):
                    part = entries[start : start + entries_per_frame(key_bytes)]
                    yield self._frame(header, Kind.ENTRIES, part.tobytes(), len(part), slot.namespace, key_bytes)
            if slot.sealed:
                references[Kind.SEALED].append(_reference(header, slot, slot.end))
            references[Kind.DROPPED] += [_reference(header, slot, at) for at in slot.dropped]
        for kind, records in references.items():
            for start in range(0, len(records), REFERENCES_PER_FRAME):
                part_records = records[start : start + REFERENCES_PER_FRAME]
                yield self._frame(header, kind, b"".join(part_records), len(part_records))

    # Slots.

    def rest_s(self, namespace: bytes, need: int) -> float:
        """Make room for the next block of a namespace; seconds until a slot may be written, 0 where none is needed."""
        slot = self._open.get(namespace)
        if (slot and self._fits(slot, need)) or PAGE + pages(need) > self.header.slot_bytes:
            return 0.0
        self.seal(namespace)
        if self._free_count() <= max(self.header.slots // FREE_MIN_SHARE, 1):
            self._evict_until(lambda: self._free_count() >= max(self.header.slots // FREE_AIM_SHARE, 2))
        number = self._free_slot()
        return 0.0 if number is None else self._rest_of(number)

    def open_slot(self, namespace: bytes, need: int) -> Slot | None:
        """The slot that the next block of a namespace goes to; None where no room can be made. After `rest_s`."""
        slot = self._open.get(namespace)
        if slot and self._fits(slot, need):
            return slot
        number = self._free_slot()
        if number is None or PAGE + pages(need) > self.header.slot_bytes or self._rest_of(number) > 0:
            return None
        return self._take_slot(number, namespace)

    def _fits(self, slot: Slot, need: int) -> bool:
        return slot.end + pages(need) <= self.header.slot_bytes

    def _take_slot(self, number: int, namespace: bytes) -> Slot:
        self._own_still()
        at = self.header.slot_offset(number)
        generation = max(self.table.generations.get(number, 0), slot_generation(self.media.read(at, PAGE).data)) + 1
        self.media.write(at, encode_slot_header(self.header, number, generation))
        self._freed_s.pop(number, None)
        slot = self._open[namespace] = self.table.take(number, generation, namespace)
        return slot

    def _free_count(self) -> int:
        return self.header.slots - len(self.table.used)

    def _free_slot(self) -> int | None:
        """A free slot, one never used first, else the one freed longest ago, that rests for the shortest time.

        Of equals any: what a former owner may still write lies in a slot that it chose itself.
        """
        free = [number for number in range(self.header.slots) if number not in self.table.used]
        secrets.SystemRandom().shuffle(free)
        return min(free, key=lambda number: self._freed_s.get(number, 0.0), default=None)

    def _rest_of(self, number: int) -> float:
        """Seconds until the grace period of a free slot is over."""
        return max(self._freed_s.get(number, -self.grace_s) + self.grace_s - time.monotonic(), 0.0)

    def seal(self, namespace: bytes) -> None:
        """Sync and close the open slot of a namespace."""
        slot = self._open.pop(namespace, None)
        if slot:
            self.sync()
            self._append(Kind.SEALED, _reference(self.header, slot, slot.end), 1)

    def sync(self) -> None:
        """Have all that was written on the medium."""
        self.media.sync()
        self._unsynced = 0

    def publish(self, slot: Slot, key_bytes: int, entries: npt.NDArray[np.void], count: int) -> None:
        """Name blocks whose payload (`count` bytes) has arrived."""
        entries["segment"], entries["generation"] = slot.number, slot.generation
        self._unsynced += count
        if not self.media.direct or self._unsynced > SYNC_BYTES:
            self.sync()
        step = entries_per_frame(key_bytes)
        for start in range(0, len(entries), step):
            part = entries[start : start + step]
            self._append(Kind.ENTRIES, part.tobytes(), len(part), slot.namespace, key_bytes)

    def drop(self, number: int, generation: int, offset: int) -> int:
        """Say that a copy is damaged, so that it does not come back; returns 0."""
        with self.lock:
            self._append(Kind.DROPPED, encode_slot_reference(self.header.writer, number, generation, offset), 1)
        return 0

    # Eviction.

    def evict_to(self, to_bytes: int) -> int:
        """Free the oldest sealed slots until at most so much is used; returns bytes freed."""
        with self.lock:
            return self._evict_until(lambda: self.used_bytes <= to_bytes)

    def erase(self, namespace: bytes) -> int:
        """Free every slot of a namespace."""
        with self.lock:
            mine = [slot for slot in self.table.used.values() if slot.namespace == namespace]
            self._open.pop(namespace, None)
            return sum(self._evict(slot) for slot in mine)

    def _evict_until(self, enough: Callable[[], bool]) -> int:
        freed = 0
        while not enough():
            opened = {slot.number for slot in self._open.values()}
            victims = [
                slot
                for slot in self.table.used.values()
                if slot.number not in opened and not self.pins.get((slot.number, slot.generation))
            ]
            if not victims:
                break
            freed += self._evict(min(victims, key=lambda slot: slot.order))
        return freed

    def _evict(self, slot: Slot) -> int:
        """Announce it; the bytes stay until the slot is used again."""
        self._append(Kind.EVICTED, _reference(self.header, slot, SEGMENT_GONE), 1)
        self._freed_s[slot.number] = time.monotonic()
        self.evicted_slots += 1
        return self.header.slot_bytes

    def _forget(self, slot: Slot) -> None:
        del self.table.used[slot.number]
        self._open = {namespace: other for namespace, other in self._open.items() if other is not slot}
        self._freed_s[slot.number] = time.monotonic()


def _reference(header: Header, slot: Slot, offset: int) -> bytes:
    return encode_slot_reference(header.writer, slot.number, slot.generation, offset)


def _joined(batches: list[tuple[int, npt.NDArray[np.void]]]) -> list[tuple[int, npt.NDArray[np.void]]]:
    """Entries of a slot as one batch per key length."""
    by_length: dict[int, list[npt.NDArray[np.void]]] = {}
    for key_bytes, entries in batches:
        by_length.setdefault(key_bytes, []).append(entries)
    return [(key_bytes, np.concatenate(parts)) for key_bytes, parts in by_length.items()]
