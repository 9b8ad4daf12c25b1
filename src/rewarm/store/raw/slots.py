"""The log of a raw pool, read: frames of the half that counts, and what they say of slots and blocks.

A handle reads it anew when the header names another epoch or owner, and from where it stopped otherwise. A page that is
no frame may not be there yet: the reader stays, and goes on behind it once a later frame of this epoch is valid. It
looks for one whenever the header has changed: an owner that could not write a frame counts as soon as it has written
the next.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.store.layout import (
    BLOCK_BYTES_MAX,
    FRAME_BYTES_MAX,
    PAGE,
    REFERENCE,
    Frame,
    Kind,
    decode_frame,
    frame_bytes_claimed,
    magic_pages,
)
from rewarm.store.raw.header import HEADER_OFFSETS, Header, newest
from rewarm.store.raw.media import Media

READ_BYTES = 256 << 10
FIRST_READ_BYTES = 16 << 10
"""A poll mostly finds nothing, or little."""
LOOK_AHEAD_BYTES = 4 << 20
"""How far behind damage a valid frame is looked for."""


class Slot(msgspec.Struct):
    """One slot in use: its generation, whom it belongs to, where its payload ends, and the entries that name blocks."""

    number: int
    generation: int
    namespace: bytes
    order: int
    end: int = PAGE
    sealed: bool = False
    entries: list[tuple[int, npt.NDArray[np.void]]] = []
    dropped: set[int] = set()


class SlotTable:
    """Which slots are in use, over all namespaces, and the last generation of those that are not."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.used: dict[int, Slot] = {}
        self.generations: dict[int, int] = {}
        self.taken: npt.NDArray[np.void] = np.zeros(0, "V1")
        """Entries of the last frame that count."""
        self._orders = 0

    def take(self, number: int, generation: int, namespace: bytes) -> Slot:
        """A slot begins a new use."""
        self._orders += 1
        self.generations[number] = generation
        slot = self.used[number] = Slot(number, generation, namespace, self._orders)
        return slot

    def apply(self, frame: Frame) -> list[int]:
        """Book what a frame says; returns the slots whose earlier blocks are no more."""
        gone: list[int] = []
        if frame.kind == Kind.ENTRIES:
            entries = frame.entries()
            entries = entries[entry_mask(entries, self.header)]
            parts = []
            for number, generation in np.unique(entries[["segment", "generation"]]).tolist():
                mine = entries[(entries["segment"] == number) & (entries["generation"] == generation)]
                gone += self._add(number, generation, frame, mine)
                slot = self.used.get(number)
                if slot and slot.generation == generation:
                    parts.append(mine)
            self.taken = np.concatenate(parts) if parts else entries[:0]
        elif frame.kind in (Kind.SEALED, Kind.EVICTED, Kind.DROPPED):
            for _, number, generation, offset in np.frombuffer(frame.body, REFERENCE, frame.count).tolist():
                gone += self._refer(Kind(frame.kind), number, generation, offset)
        return gone

    def _add(self, number: int, generation: int, frame: Frame, entries: npt.NDArray[np.void]) -> list[int]:
        last = self.generations.get(number, 0)
        slot, gone = self.used.get(number), []
        if generation < last or (generation == last and slot is None):
            return []
        if slot is None or generation > last:
            gone = [number] if slot else []
            slot = self.take(number, generation, frame.namespace)
        slot.entries.append((frame.key_bytes, entries))
        slot.end = max(slot.end, int((entries["offset"] + -(-entries["length"].astype(np.int64) // PAGE) * PAGE).max()))
        return gone

    def _refer(self, kind: Kind, number: int, generation: int, offset: int) -> list[int]:
        slot = self.used.get(number)
        if kind == Kind.EVICTED:
            if generation < self.generations.get(number, 0):
                return []
            self.generations[number] = generation
            return [number] if self.used.pop(number, None) else []
        if slot and slot.generation == generation:
            if kind == Kind.SEALED:
                slot.sealed = True
            else:
                slot.dropped.add(offset)
        return []

    def live(self, slot: Slot) -> Iterator[tuple[int, npt.NDArray[np.void]]]:
        """(key bytes, entries) of a slot, without what is damaged."""
        for key_bytes, entries in slot.entries:
            if slot.dropped:
                entries = entries[~np.isin(entries["offset"], np.array(list(slot.dropped), np.uint64))]
            if len(entries):
                yield key_bytes, entries


def entry_mask(entries: npt.NDArray[np.void], header: Header) -> npt.NDArray[np.bool_]:
    """Which entries a reader may take, shape (entries,): inside a slot, on a page, of a counted use."""
    offset, length = entries["offset"], entries["length"]
    mask: npt.NDArray[np.bool_] = (offset >= PAGE) & (offset % PAGE == 0) & (offset < header.slot_bytes)
    mask &= (length > 0) & (length <= BLOCK_BYTES_MAX) & (offset + length <= header.slot_bytes)
    mask &= (entries["segment"] < header.slots) & (entries["generation"] > 0)
    return mask


def read_header(media: Media) -> Header | None:
    """The header that counts now. Raises `OSError`."""
    return newest(media.read(0, HEADER_OFFSETS[-1] + PAGE).data)


class LogTail:
    """Reads the log half that counts, frame by frame. Used by one thread at a time."""

    def __init__(
        self, media: Media, pool_id: bytes, taken: Callable[[Frame], object], begin: Callable[[Header], None]
    ) -> None:
        self._media = media
        self._pool_id = pool_id
        self._taken = taken
        self._begin = begin
        self.header: Header | None = None
        self.at = 0
        self.sequence = 0
        self.read_bytes = 0
        self._looked: Header | None = None

    def refresh(self) -> None:
        """Take what is new. Raises `OSError`."""
        header = read_header(self._media)
        self.read_bytes += HEADER_OFFSETS[-1] + PAGE
        if header is None or header.pool_id != self._pool_id:
            found = "no raw pool" if header is None else f"another pool, {header.pool_id.hex()}"
            raise OSError(errno.ENODATA, f"{self._media.path} holds {found} now")
        last = self.header
        self.header = header
        if last is None or (last.epoch, last.writer) != (header.epoch, header.writer):
            self.at = self.sequence = 0
            self._begin(header)
        if header.epoch:
            count = FIRST_READ_BYTES
            while self._read_some(header, count):
                count = READ_BYTES

    def _read_some(self, header: Header, count: int) -> bool:
        """Take the frames of one read; True when there may be more."""
        start = header.half_offset(header.epoch)
        data = self._read(start + self.at, min(count, header.half_bytes - self.at))
        if len(data) < FRAME_BYTES_MAX and frame_bytes_claimed(data, 0) > len(data):
            data = self._read(start + self.at, min(FRAME_BYTES_MAX, header.half_bytes - self.at))
        at = 0
        while frame := self._next(data, at, header):
            self._take(frame)
            at += frame.bytes_total
        if at:
            self.at += at
            return self.at < header.half_bytes
        return self._skip_damage(start, header)

    def _read(self, offset: int, count: int) -> memoryview:
        data = self._media.read(offset, count).data
        self.read_bytes += len(data)
        return data

    def _next(self, data: memoryview, at: int, header: Header) -> Frame | None:
        frame = decode_frame(data, at)
        mine = frame and (frame.epoch, frame.writer) == (header.epoch, header.writer)
        return frame if frame and mine and frame.sequence > self.sequence else None

    def _take(self, frame: Frame) -> None:
        self.sequence = frame.sequence
        self._taken(frame)

    def _skip_damage(self, start: int, header: Header) -> bool:
        if self.at >= header.half_bytes or header == self._looked:
            return False
        data = self._read(start + self.at, min(LOOK_AHEAD_BYTES, header.half_bytes - self.at))
        for at in magic_pages(data):
            if at and self._next(data, at, header):
                self.at += at
                return True
        self._looked = header
        return False
