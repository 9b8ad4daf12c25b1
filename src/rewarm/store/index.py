"""The index of one namespace: which keys are held, and where their copies lie. Memory only.

A dictionary from whole keys to rows, and one numpy column per field, so that a million entries are added, gathered and
removed in bulk, at about 200 bytes each with 32-byte keys. Up to two copies of a key are kept, so that a damaged or
evicted one has a fallback. Changes are made under the store's lock; `has` and `contains` need none.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.store.layout import PAGE

NO_ROW = -1
GROWTH = 1.2
ROWS_MIN = 1024
PAGE_MAX = 0xFFFFFFFF


class Places(msgspec.Struct, frozen=True, eq=False):
    """Where blocks lie, shape (blocks,) each; `row` is -1 for a key that is not held."""

    row: npt.NDArray[np.int64]
    segment: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    checksum: list[bytes]


class Index:
    """Keys to copies. Segments are named by the slot that the store's segment table gives them."""

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        self._segment = np.empty(0, np.uint32)
        self._page = np.empty(0, np.uint32)
        self._length = np.empty(0, np.uint32)
        self._checksum = np.empty(0, "V16")
        self._other = np.empty(0, np.int32)
        self._reads = np.empty(0, np.uint8)
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, key: bytes) -> bool:
        """True when some copy of the key is known."""
        return key in self._rows

    def contains(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Mask over keys, shape (keys,)."""
        return np.fromiter(map(self._rows.__contains__, keys), np.bool_, len(keys))

    def keys(self) -> list[bytes]:
        """Every key held."""
        return list(self._rows)

    def places(self, keys: Sequence[bytes]) -> Places:
        """First copies of keys."""
        get = self._rows.get
        return self.places_of(np.fromiter((get(key, NO_ROW) for key in keys), np.int64, len(keys)))

    def places_of(self, rows: npt.NDArray[np.int64]) -> Places:
        """Places of rows; those of row -1 are meaningless."""
        if not len(self._keys):
            nothing = np.zeros(len(rows), np.int64)
            return Places(rows, nothing, nothing, nothing, [b""] * len(rows))
        checksums: list[bytes] = self._checksum[rows].tolist()
        return Places(
            rows,
            self._segment[rows].astype(np.int64),
            self._page[rows].astype(np.int64) * PAGE,
            self._length[rows].astype(np.int64),
            checksums,
        )

    def second(self, key: bytes, not_row: int) -> int:
        """The row of another copy of the key than `not_row`, or -1."""
        row = self._rows.get(key, NO_ROW)
        if row == NO_ROW or row != not_row:
            return row
        return int(self._other[row])

    def note_reads(self, rows: npt.NDArray[np.int64]) -> None:
        """Count that these rows, none of them -1, are read; up to 255 times."""
        self._reads[rows] = np.minimum(self._reads[rows], 254) + 1

    def most_read(self, slot: int) -> list[tuple[bytes, int, int, bytes]]:
        """(key, offset, length, checksum) of the blocks of a segment that were read, those read most first.

        A key that has another copy is left out.
        """
        used = len(self._keys)
        rows = np.flatnonzero((self._segment[:used] == slot) & (self._reads[:used] > 0))
        rows = rows[np.argsort(-self._reads[rows].astype(np.int16), kind="stable")]
        places = self.places_of(rows)
        facts = zip(places.offset.tolist(), places.length.tolist(), places.checksum, strict=True)
        found = []
        for row, (offset, length, checksum) in zip(rows.tolist(), facts, strict=True):
            key = self._keys[row]
            if key is not None and self._rows[key] == row and self._other[row] == NO_ROW:
                found.append((key, offset, length, checksum))
        return found

    def add(
        self,
        keys: list[bytes],
        segments: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint32],
        checksums: npt.NDArray[np.void],
    ) -> None:
        """Add copies, shape (entries,) each. A third copy of a key, and a copy already known, are left out."""
        if not self._rows.keys().isdisjoint(keys) or len(set(keys)) != len(keys):
            keep = self._admissible(keys, segments, offsets)
            keys = [keys[i] for i in keep]
            segments, offsets, lengths, checksums = segments[keep], offsets[keep], lengths[keep], checksums[keep]
        rows = self._allocate(len(keys))
        where = np.array(rows, np.int64)
        self._segment[where] = segments
        self._page[where] = offsets // np.uint64(PAGE)
        self._length[where] = lengths
        self._checksum[where] = checksums
        self._other[where] = NO_ROW
        self._reads[where] = 0
        self._attach(keys, rows)

    def remove_segments(self, slots: Sequence[int]) -> int:
        """Forget every copy in these segments; returns how many keys are gone altogether."""
        before = len(self._rows)
        gone = np.flatnonzero(np.isin(self._segment[: len(self._keys)], np.array(slots, np.uint32)))
        for row in gone.tolist():
            if self._keys[row] is not None:
                self._remove(row)
        return before - len(self._rows)

    def remove_copy(self, key: bytes, segment: int, offset: int) -> bool:
        """Forget the copy of a key at one place; returns whether there was one."""
        row = self._rows.get(key, NO_ROW)
        while row != NO_ROW:
            if self._segment[row] == segment and int(self._page[row]) * PAGE == offset:
                self._remove(row)
                return True
            row = int(self._other[row])
        return False

    def remove_places(self, segment: int, offsets: Sequence[int]) -> int:
        """Forget whatever lies at these places of a segment; returns how many copies that were."""
        used = len(self._keys)
        pages = np.array([offset // PAGE for offset in offsets if offset // PAGE <= PAGE_MAX], np.uint32)
        match = np.flatnonzero(self._segment[:used] == segment)
        rows = match[np.isin(self._page[match], pages)].tolist()
        for row in rows:
            self._remove(row)
        return len(rows)

    def entries_of(self, slots: Sequence[int]) -> tuple[list[bytes], npt.NDArray[np.int64], Places]:
        """Every copy in these segments: keys, the slots they lie in, shape (copies,), and their places."""
        used = len(self._keys)
        rows = np.flatnonzero(np.isin(self._segment[:used], np.array(slots, np.uint32)))
        keys = [key for key in map(self._keys.__getitem__, rows.tolist()) if key is not None]
        assert len(keys) == len(rows), "a row that is free lies in no segment"
        places = self.places_of(rows)
        return keys, places.segment, places

    def keep_places(
        self, slots: Sequence[int], kept_slots: npt.NDArray[np.int64], kept_offsets: npt.NDArray[np.uint64]
    ) -> int:
        """Forget what lies in the segments `slots` at other places than these; returns how many copies that were."""
        used = len(self._keys)
        rows = np.flatnonzero(np.isin(self._segment[:used], np.array(slots, np.uint32)))
        here = (self._segment[rows].astype(np.uint64) << np.uint64(32)) | self._page[rows].astype(np.uint64)
        kept = (kept_slots.astype(np.uint64) << np.uint64(32)) | (kept_offsets // np.uint64(PAGE))
        gone = rows[~np.isin(here, kept)].tolist()
        for row in gone:
            self._remove(row)
        return len(gone)

    def in_segment(self, slot: int) -> int:
        """Copies that lie in one segment."""
        return int(np.count_nonzero(self._segment[: len(self._keys)] == slot))

    def _admissible(
        self, keys: list[bytes], segments: npt.NDArray[np.int64], offsets: npt.NDArray[np.uint64]
    ) -> list[int]:
        """Entries that are new, or a second copy at another place; of a key twice in one batch the last."""
        last = {key: i for i, key in enumerate(keys)}
        keep = []
        for key, i in last.items():
            row = self._rows.get(key, NO_ROW)
            if row != NO_ROW:
                same = self._segment[row] == segments[i] and int(self._page[row]) * PAGE == offsets[i]
                if same or self._other[row] != NO_ROW:
                    continue
            keep.append(i)
        return keep

    def _attach(self, keys: list[bytes], rows: list[int]) -> None:
        for row, key in zip(rows, keys, strict=True):
            self._keys[row] = key
        if self._rows.keys().isdisjoint(keys):
            self._rows.update(zip(keys, rows, strict=True))
            return
        for key, row in zip(keys, rows, strict=True):
            first = self._rows.setdefault(key, row)
            if first != row:
                self._other[first] = row

    def _remove(self, row: int) -> None:
        key = self._keys[row]
        assert key is not None
        first = self._rows[key]
        other = int(self._other[first])
        if first != row:
            assert other == row
            self._other[first] = NO_ROW
        elif other != NO_ROW:
            self._rows[key] = other
        else:
            del self._rows[key]
        self._keys[row] = None
        self._segment[row] = np.uint32(0xFFFFFFFF)
        self._free.append(row)

    def _allocate(self, count: int) -> list[int]:
        reuse = min(count, len(self._free))
        rows = self._free[len(self._free) - reuse :]
        del self._free[len(self._free) - reuse :]
        used = len(self._keys)
        fresh = count - reuse
        if used + fresh > len(self._segment):
            self._grow(used + fresh)
        self._keys.extend([None] * fresh)
        rows.extend(range(used, used + fresh))
        return rows

    def _grow(self, needed: int) -> None:
        size = max(int(needed * GROWTH), ROWS_MIN)
        for name in ("_segment", "_page", "_length", "_checksum", "_other", "_reads"):
            old = getattr(self, name)
            new = np.empty(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
