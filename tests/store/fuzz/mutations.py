"""Hostile inputs: good ones, changed a little. Half of the frames and headers get a checksum that is right again."""

from __future__ import annotations

import random
import struct

import numpy as np
from tests.store.fuzz.parsers import WRITER

from rewarm.store import layout
from rewarm.store.layout import PAGE, TRAILER_BYTES, Kind
from rewarm.store.pool import PoolFacts, encode_facts, segment_bytes_for

EXTREMES = [0, 1, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1]
HEADER_FIELDS = [(8, "<I"), (12, "<H"), (14, "<H"), (16, "<Q"), (24, "<Q"), (80, "<I"), (84, "<H"), (86, "<H")]
JSON_PIECES = [b"{", b"}", b"[" * 500, b'"', b"\\u0000", b"-1", b"1e999", b"null", b"\xff", b'"format":2,', b"9" * 400]


def _frames() -> list[bytes]:
    made = [layout.encode_frame(Kind.OPEN, 1, 1, WRITER, layout.encode_open(bytes(16), 1 << 24, 1 << 18), 1)]
    for key_bytes, count in ((8, 1), (32, 40), (64, 3)):
        entries = np.zeros(count, layout.entry_dtype(key_bytes))
        entries["offset"], entries["length"] = PAGE * (1 + np.arange(count)), 100
        raw = entries.tobytes()
        made.append(
            layout.encode_frame(Kind.ENTRIES, 1, 2, WRITER, raw, count, namespace=bytes(32), key_bytes=key_bytes)
        )
    for kind in (Kind.SEALED, Kind.EVICTED, Kind.DROPPED, Kind.ROLLED):
        made.append(layout.encode_frame(kind, 1, 3, WRITER, layout.encode_reference(WRITER, 1, PAGE), 1))
    made.append(layout.encode_frame(Kind.COUNTER, 1, 4, WRITER, b"", 0))
    return made


def seeds() -> dict[str, list[bytes]]:
    """Good inputs of each parser."""
    capacity = 16 << 20
    facts = PoolFacts(1, "ab" * 16, capacity, segment_bytes_for(capacity), "group", "a host")
    return {
        "frame": _frames(),
        "pool": [encode_facts(facts)],
        "segment": [layout.encode_segment_header(1, WRITER, bytes(16))],
        "log": [b"".join(_frames())],
    }


def mutate(parser: str, good: bytes, dice: random.Random) -> bytes:
    """A changed copy."""
    data = bytearray(good)
    for _ in range(dice.choice((1, 1, 2, 5))):
        _change(parser, data, dice)
    if parser != "pool" and dice.random() < 0.5:
        _sum_again(data, dice)
    return bytes(data)


def _change(parser: str, data: bytearray, dice: random.Random) -> None:
    what = dice.randrange(5)
    at = dice.randrange(len(data)) if data else 0
    if what == 0 and data:
        data[at] = dice.randrange(256)
    elif what == 1:
        del data[at : at + dice.choice((1, 16, PAGE))]
    elif what == 2:
        piece = dice.choice(JSON_PIECES) if parser == "pool" else bytes(dice.choice((1, PAGE)))
        data[at:at] = piece
    elif parser == "pool":
        data[at : at + dice.randrange(4)] = str(dice.choice(EXTREMES)).encode()
    else:
        start = dice.randrange(-(-len(data) // PAGE)) * PAGE if data else 0
        offset, kind = dice.choice(HEADER_FIELDS) if what == 3 else (dice.randrange(88, 300), "<Q")
        size = struct.calcsize(kind)
        if start + offset + size <= len(data):
            struct.pack_into(kind, data, start + offset, dice.choice(EXTREMES) & ((1 << 8 * size) - 1))


def _sum_again(data: bytearray, dice: random.Random) -> None:
    """What a hostile writer can do as well as an honest one."""
    start = dice.randrange(max(len(data) // PAGE, 1)) * PAGE
    if start + PAGE <= len(data):
        claimed = layout.frame_bytes_claimed(memoryview(data), start) or PAGE
        end = start + min(claimed, (len(data) - start) // PAGE * PAGE) - TRAILER_BYTES
        data[end : end + TRAILER_BYTES] = layout.digest(bytes(data[start:end]))
