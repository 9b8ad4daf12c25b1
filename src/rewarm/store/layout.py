"""Format 1 in bytes: frames of the index log, records, headers of segments. See docs/reference/format-1.md.

Pure functions over bytes: nothing here opens a file. Decoding never raises on hostile input: what is not valid is
`None` or left out.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

FORMAT = 1
PAGE = 4096
FRAME_MAGIC = b"RWFRAME1"
SEGMENT_MAGIC = b"RWSEGMT1"
FRAME_PAGES_MAX = 256
FRAME_BYTES_MAX = FRAME_PAGES_MAX * PAGE
HEADER_BYTES = 128
TRAILER_BYTES = 16
BLOCK_BYTES_MAX = 1 << 30
SEGMENT_GONE = (1 << 64) - 1

_HEADER = struct.Struct("<8sIHHQQ16s32sIHHQ32x")
_SEGMENT = struct.Struct("<8sII16s16sQ")
_OPEN = struct.Struct("<16sQQ")
_COUNTER = struct.Struct("<Q")
assert _HEADER.size == HEADER_BYTES

REFERENCE = np.dtype([("writer", "V16"), ("segment", "<u4"), ("generation", "<u4"), ("offset", "<u8")])
_REFERENCE = struct.Struct("<16sIIQ")


class Kind(enum.IntEnum):
    """Kinds of frames."""

    OPEN = 1
    ENTRIES = 2
    SEALED = 3
    EVICTED = 4
    DROPPED = 5
    COUNTER = 6
    ROLLED = 7


def entry_dtype(key_bytes: int) -> np.dtype[np.void]:
    """Record of an ENTRIES frame for one key length."""
    return np.dtype(
        [
            ("key", f"V{key_bytes}"),
            ("segment", "<u4"),
            ("generation", "<u4"),
            ("offset", "<u8"),
            ("length", "<u4"),
            ("flags", "<u4"),
            ("checksum", "V16"),
        ]
    )


class Frame(msgspec.Struct, frozen=True):
    """A valid frame: its header and the bytes of its records."""

    kind: int
    bytes_total: int
    epoch: int
    sequence: int
    writer: bytes
    namespace: bytes
    count: int
    key_bytes: int
    body: memoryview

    def entries(self) -> npt.NDArray[np.void]:
        """Records of an ENTRIES frame, dtype `entry_dtype(key_bytes)`, shape (count,)."""
        return np.frombuffer(self.body, entry_dtype(self.key_bytes), self.count)

    def references(self) -> list[tuple[bytes, int, int]]:
        """Records of a SEALED, EVICTED, DROPPED or ROLLED frame: (writer, segment, offset)."""
        records = np.frombuffer(self.body, REFERENCE, self.count)
        return [(bytes(writer), segment, offset) for writer, segment, _, offset in records.tolist()]

    def lease_s(self) -> float | None:
        """The lease that a COUNTER frame names, seconds; None where it names none."""
        return float(_COUNTER.unpack_from(self.body)[0] / 1000) if self.count else None

    def opening(self) -> tuple[bytes, int, int]:
        """Record of an OPEN frame: (pool id, capacity bytes, segment bytes)."""
        pool_id, capacity, segment = _OPEN.unpack_from(self.body)
        return pool_id, capacity, segment


def pages(count: int) -> int:
    """Bytes rounded up to whole pages."""
    return -(-count // PAGE) * PAGE


def digest(data: Any) -> bytes:
    """XXH3-128 of anything with the buffer protocol, 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def encode_frame(
    kind: int,
    epoch: int,
    sequence: int,
    writer: bytes,
    records: bytes,
    count: int,
    *,
    namespace: bytes = bytes(32),
    key_bytes: int = 0,
) -> bytes:
    """One frame in whole pages."""
    total = pages(HEADER_BYTES + len(records) + TRAILER_BYTES)
    assert total <= FRAME_BYTES_MAX, "the caller splits records over frames"
    header = _HEADER.pack(FRAME_MAGIC, total, FORMAT, kind, epoch, sequence, writer, namespace, count, key_bytes, 0, 0)
    padding = bytes(total - HEADER_BYTES - len(records) - TRAILER_BYTES)
    content = header + records + padding
    return content + digest(content)


def entries_per_frame(key_bytes: int) -> int:
    """How many entries with keys of this length one frame holds."""
    return (FRAME_BYTES_MAX - HEADER_BYTES - TRAILER_BYTES) // (key_bytes + 40)


REFERENCES_PER_FRAME = (FRAME_BYTES_MAX - HEADER_BYTES - TRAILER_BYTES) // _REFERENCE.size
"""How many references one frame holds."""


def encode_open(pool_id: bytes, capacity: int, segment: int) -> bytes:
    """Record of an OPEN frame."""
    return _OPEN.pack(pool_id, capacity, segment)


def encode_counter(lease_s: float) -> bytes:
    """Record of a COUNTER frame."""
    return _COUNTER.pack(int(lease_s * 1000))


def encode_reference(writer: bytes, segment: int, offset: int) -> bytes:
    """Record of a SEALED, EVICTED, DROPPED or ROLLED frame."""
    return _REFERENCE.pack(writer, segment, 0, offset)


_RECORD_BYTES = {
    Kind.OPEN: _OPEN.size,
    Kind.SEALED: _REFERENCE.size,
    Kind.EVICTED: _REFERENCE.size,
    Kind.DROPPED: _REFERENCE.size,
    Kind.ROLLED: _REFERENCE.size,
    Kind.COUNTER: 0,
}


def decode_frame(data: memoryview, at: int = 0) -> Frame | None:
    """The frame that starts at byte `at`, or None where there is none, or not all of it."""
    if len(data) - at < PAGE or data[at : at + 8] != FRAME_MAGIC:
        return None
    head = _HEADER.unpack_from(data, at)
    _, total, version, kind, epoch, sequence, writer, namespace, count, key_bytes, _, _ = head
    if version != FORMAT or total % PAGE or not PAGE <= total <= FRAME_BYTES_MAX or at + total > len(data):
        return None
    room = total - HEADER_BYTES - TRAILER_BYTES
    if kind == Kind.ENTRIES:
        if not 8 <= key_bytes <= 64 or count * (key_bytes + 40) > room:
            return None
    elif count * _RECORD_BYTES.get(kind, 0) > room:
        return None
    end = at + total - TRAILER_BYTES
    if digest(data[at:end]) != data[end : end + TRAILER_BYTES]:
        return None
    body = data[at + HEADER_BYTES : end]
    return Frame(kind, total, epoch, sequence, writer, namespace, count, key_bytes, body)


def frame_bytes_claimed(data: memoryview, at: int) -> int:
    """Size that a frame header at `at` claims, 0 if it is none: tells a frame cut by the buffer's end from damage."""
    if len(data) - at < PAGE or data[at : at + 8] != FRAME_MAGIC:
        return 0
    total = int(struct.unpack_from("<I", data, at + 8)[0])
    return total if total % PAGE == 0 and PAGE <= total <= FRAME_BYTES_MAX else 0


def magic_pages(data: memoryview) -> list[int]:
    """Where frames may start: offsets of the whole pages that begin with a frame's magic."""
    words = np.frombuffer(data[: len(data) // PAGE * PAGE], "<u8").reshape(-1, PAGE // 8)
    found: list[int] = (np.flatnonzero(words[:, 0] == int.from_bytes(FRAME_MAGIC, "little")) * PAGE).tolist()
    return found


def scan_frames(data: memoryview) -> Iterator[tuple[int, Frame]]:
    """Every valid frame in `data` with its offset; what is not one is stepped over page by page."""
    at = 0
    while at + PAGE <= len(data):
        frame = decode_frame(data, at)
        if frame:
            yield at, frame
        at += frame.bytes_total if frame else PAGE


def encode_segment_header(number: int, writer: bytes, pool_id: bytes) -> bytes:
    """First page of a segment."""
    head = _SEGMENT.pack(SEGMENT_MAGIC, FORMAT, number, writer, pool_id, 0)
    content = head + bytes(PAGE - TRAILER_BYTES - len(head))
    return content + digest(content)


def segment_header_is(data: bytes | memoryview, number: int, writer: bytes) -> bool:
    """True when `data` starts with the valid header of this segment."""
    if len(data) < PAGE or digest(data[: PAGE - TRAILER_BYTES]) != data[PAGE - TRAILER_BYTES : PAGE]:
        return False
    magic, version, found, owner, _, _ = _SEGMENT.unpack_from(data)
    return bool(magic == SEGMENT_MAGIC and version == FORMAT and found == number and owner == writer)


def is_other_version(page: bytes | memoryview) -> bool:
    """True when a file's first page says that it is a log or a segment of another version than this one."""
    start, version = bytes(page[:8]), page[12:14] if page[:7] == FRAME_MAGIC[:7] else page[8:12]
    if start[:7] not in (FRAME_MAGIC[:7], SEGMENT_MAGIC[:7]) or len(page) < PAGE:
        return False
    return start not in (FRAME_MAGIC, SEGMENT_MAGIC) or int.from_bytes(version, "little") != FORMAT


def overlaps(offsets: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Offsets of payloads of one segment that begin within the pages of an earlier one; the same twice is none."""
    order = np.argsort(offsets, kind="stable")
    start, length = offsets[order].astype(np.int64), lengths[order].astype(np.int64)
    reach = np.maximum.accumulate(start + -(-length // PAGE) * PAGE)[:-1]
    bad = (start[1:] < reach) & ((start[1:] != start[:-1]) | (length[1:] != length[:-1]))
    return np.unique(offsets[order][1:][bad])


def entry_mask(entries: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which entries a reader may take (format-1, section 4), shape (entries,)."""
    offset, length = entries["offset"], entries["length"]
    mask: npt.NDArray[np.bool_] = (offset >= PAGE) & (offset % PAGE == 0) & (offset < 1 << 44)
    mask &= (length > 0) & (length <= BLOCK_BYTES_MAX) & (entries["generation"] == 0)
    return mask
