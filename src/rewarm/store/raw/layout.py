"""What raw pools add to the bytes of format 1: generations in slot headers and references. Pure functions."""

from __future__ import annotations

import struct

from rewarm.store.layout import FORMAT, PAGE, SEGMENT_MAGIC, TRAILER_BYTES, digest
from rewarm.store.raw.header import Header

_SEGMENT = struct.Struct("<8sII16s16sQ")
_REFERENCE = struct.Struct("<16sIIQ")


def encode_slot_header(header: Header, number: int, generation: int) -> bytes:
    """First page of a slot in one of its uses."""
    head = _SEGMENT.pack(SEGMENT_MAGIC, FORMAT, number, header.writer, header.pool_id, generation)
    content = head + bytes(PAGE - TRAILER_BYTES - len(head))
    return content + digest(content)


def slot_generation(page: bytes | memoryview) -> int:
    """The generation that the first page of a slot names; 0 where it is none."""
    if len(page) < PAGE or digest(page[: PAGE - TRAILER_BYTES]) != page[PAGE - TRAILER_BYTES : PAGE]:
        return 0
    magic, version, _, _, _, generation = _SEGMENT.unpack_from(page)
    return int(generation) if magic == SEGMENT_MAGIC and version == FORMAT else 0


def encode_slot_reference(writer: bytes, number: int, generation: int, offset: int) -> bytes:
    """Record of a SEALED, EVICTED or DROPPED frame."""
    return _REFERENCE.pack(writer, number, generation, offset)
