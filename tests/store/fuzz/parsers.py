"""What the three parsers of the store must do with any bytes: answer, never raise, stay within what they were given.

Each function returns the *feature* of an input: a word for the way it took through the parser. Inputs of a new feature
are worth keeping.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rewarm.errors import FormatError
from rewarm.store import layout
from rewarm.store.layout import FORMAT, FRAME_BYTES_MAX, PAGE, Kind
from rewarm.store.log import LogReader, LogTail
from rewarm.store.pool import CAPACITY_BYTES_MIN, OtherFormat, decode_facts, segment_bytes_for

WRITER = bytes.fromhex("a1" * 16)
_POOL_FILE = Path("/pool.json")


def frame(data: bytes) -> str:
    """`decode_frame` and everything that reads a frame's records."""
    view = memoryview(data)
    found = layout.decode_frame(view)
    count = sum(1 for _ in layout.scan_frames(view))
    assert count <= len(data) // PAGE
    assert all(at % PAGE == 0 for at in layout.magic_pages(view))
    assert layout.frame_bytes_claimed(view, 0) in range(0, FRAME_BYTES_MAX + 1, PAGE)
    if found is None:
        return f"none {data[:8] == layout.FRAME_MAGIC} {min(count, 2)}"
    assert PAGE <= found.bytes_total <= len(data)
    if found.kind == Kind.ENTRIES:
        entries = found.entries()
        assert len(entries) == found.count
        good = entries[layout.entry_mask(entries)]
        assert all(PAGE <= at < 1 << 44 and at % PAGE == 0 for at in good["offset"].tolist())
        assert all(0 < length <= layout.BLOCK_BYTES_MAX for length in good["length"].tolist())
        return f"entries {found.key_bytes} {min(found.count, 2)} {len(good) == len(entries)}"
    if found.kind == Kind.OPEN:
        assert len(found.opening()) == 3
    elif found.kind in (Kind.SEALED, Kind.EVICTED, Kind.DROPPED, Kind.ROLLED):
        assert len(found.references()) == found.count
    return f"kind {min(found.kind, 9)} {min(found.count, 2)}"


def pool(data: bytes) -> str:
    """`decode_facts`: sane values or `FormatError`."""
    try:
        facts = decode_facts(data, _POOL_FILE)
    except OtherFormat:
        return "other format"
    except FormatError as error:
        return "impossible" if "impossible" in str(error) else "damaged"
    assert facts.format == FORMAT
    assert facts.capacity_bytes >= CAPACITY_BYTES_MIN
    assert facts.segment_bytes == segment_bytes_for(facts.capacity_bytes)
    assert len(bytes.fromhex(facts.pool_id)) == 16
    return facts.access


def segment(data: bytes) -> str:
    """`segment_header_is`: only this segment's own header."""
    found = layout.segment_header_is(data, 1, WRITER)
    assert not found or layout.encode_segment_header(1, WRITER, data[32:48])[:48] == data[:48]
    return f"{found} {data[:8] == layout.SEGMENT_MAGIC} {len(data) >= PAGE}"


class Log:
    """The reader of whole logs, over a file in memory."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("log", os.MFD_CLOEXEC)
        self._reader = LogReader()

    def __call__(self, data: bytes) -> str:
        """It ends, and never claims to have read more than is there."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)
        tail = LogTail(WRITER.hex())
        frames = sum(1 for _ in self._reader.frames(self._descriptor, tail))
        assert tail.offset <= len(data)
        assert sum(end - start for start, end in tail.skips) <= len(data)
        return f"{min(frames, 3)} frames {min(len(tail.skips), 2)} skips {tail.offset == len(data)}"


PARSERS: dict[str, Callable[[bytes], str]] = {"frame": frame, "pool": pool, "segment": segment, "log": Log()}
