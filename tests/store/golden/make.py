"""Writes the golden files of format 1 from the words of docs/reference/format-1.md alone.

It shares no code with the package, so that the tests compare two readings of one page. Run it only when that page
changes, which it must not: `python tests/store/golden/make.py`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import xxhash

HERE = Path(__file__).parent
PAGE = 4096
POOL_ID = bytes(range(0x10, 0x20))
ALICE, BOB = bytes.fromhex("a1" * 16), bytes.fromhex("b0" * 16)
CAPACITY, SEGMENT = 8 << 20, 128 << 10
NAMESPACE = hashlib.sha256(b"rewarm namespace 1\0" + b"golden").digest()
OPEN, ENTRIES, SEALED, EVICTED, DROPPED, COUNTER, UNKNOWN = 1, 2, 3, 4, 5, 6, 99
GONE = (1 << 64) - 1


def block(key: bytes, size: int) -> bytes:
    """The bytes that lie under a key."""
    return hashlib.shake_128(key).digest(size)


def whole(data: bytes) -> bytes:
    """Zeros up to the next page."""
    return data + bytes(-len(data) % PAGE)


def checksum(data: bytes) -> bytes:
    """XXH3-128, big-endian."""
    return xxhash.xxh3_128(data).digest()


def frame(kind: int, sequence: int, writer: bytes, records: bytes, count: int, key_bytes: int = 0) -> bytes:
    """Section 5.1."""
    namespace = NAMESPACE if kind == ENTRIES else bytes(32)
    size = len(whole(bytes(128 + len(records) + 16)))
    header = b"RWFRAME1" + struct.pack("<IHHQQ", size, 1, kind, 1, sequence) + writer + namespace
    header += struct.pack("<IHHQ", count, key_bytes, 0, 0) + bytes(32)
    assert len(header) == 128
    body = header + records
    body += bytes(size - 16 - len(body))
    return body + checksum(body)


def entry(key: bytes, segment: int, offset: int, data: bytes) -> bytes:
    """One record of an ENTRIES frame."""
    return key + struct.pack("<IIQII", segment, 0, offset, len(data), 0) + checksum(data)


def reference(writer: bytes, segment: int, offset: int) -> bytes:
    """One record of a SEALED, EVICTED or DROPPED frame."""
    return writer + struct.pack("<IIQ", segment, 0, offset)


def opening(writer: bytes) -> bytes:
    """The first frame of each log."""
    return frame(OPEN, 1, writer, POOL_ID + struct.pack("<QQ", CAPACITY, SEGMENT), 1)


def header(number: int, writer: bytes) -> bytes:
    """Section 4: the first page of a segment."""
    head = b"RWSEGMT1" + struct.pack("<II", 1, number) + writer + POOL_ID + struct.pack("<Q", 0)
    head += bytes(PAGE - 16 - len(head))
    return head + checksum(head)


def segment(number: int, writer: bytes, blocks: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """A segment's file, and the records that name its blocks."""
    content, records = header(number, writer), b""
    for key, data in blocks:
        records += entry(key, number, len(content), data)
        content += whole(data)
    return content, records


KEYS = {name: hashlib.sha256(name.encode()).digest() for name in ("one", "two", "three", "four", "damaged", "evicted")}
SHORT_KEY = b"8 bytes."
SIZES = {"one": 5000, "two": 4096, "three": 1, "four": 12_345, "damaged": 3000}


def alice() -> dict[str, bytes]:
    """Two segments, the first sealed; announces that a third is evicted, and that one copy of Bob's is damaged."""
    first, records = segment(1, ALICE, [(KEYS[n], block(KEYS[n], SIZES[n])) for n in ("one", "two", "three")])
    second, short = segment(2, ALICE, [(SHORT_KEY, block(SHORT_KEY, 77))])
    log = [
        opening(ALICE),
        frame(ENTRIES, 2, ALICE, records, 3, 32),
        frame(SEALED, 3, ALICE, reference(ALICE, 1, len(first)), 1),
        frame(ENTRIES, 4, ALICE, short, 1, len(SHORT_KEY)),
        frame(ENTRIES, 5, ALICE, entry(KEYS["evicted"], 3, PAGE, b"evicted"), 1, 32),
        frame(EVICTED, 6, ALICE, reference(ALICE, 3, GONE), 1),
        frame(DROPPED, 7, ALICE, reference(BOB, 1, 5 * PAGE), 1),
    ]
    return {"00000001.log": b"".join(log), "00000001.seg": first, "00000002.seg": second}


def bob() -> dict[str, bytes]:
    """One open segment with a damaged copy; a counter, an unknown kind and a page of damage in the log."""
    content, records = segment(1, BOB, [(KEYS[n], block(KEYS[n], SIZES[n])) for n in ("four", "damaged")])
    content = content[: 5 * PAGE] + b"\xff" + content[5 * PAGE + 1 :]
    log = [
        opening(BOB),
        frame(COUNTER, 2, BOB, b"", 0),
        b"\xee" * PAGE,
        frame(UNKNOWN, 4, BOB, b"of a later version", 1),
        frame(ENTRIES, 5, BOB, records, 2, 32),
    ]
    return {"00000001.log": b"".join(log), "00000001.seg": content}


def main() -> None:
    """Write everything anew."""
    pool = HERE / "pool"
    shutil.rmtree(pool, ignore_errors=True)
    for writer, files in ((ALICE, alice()), (BOB, bob())):
        folder = pool / "writers" / writer.hex()
        folder.mkdir(parents=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    (pool / "namespaces").mkdir()
    digest = NAMESPACE.hex()
    (pool / "namespaces" / f"{digest}.json").write_text(json.dumps({"digest": digest, "describe": "golden"}))
    facts = {"format": 1, "pool_id": POOL_ID.hex(), "capacity_bytes": CAPACITY, "segment_bytes": SEGMENT}
    facts |= {"access": "private", "host": "golden", "a field of later": "is ignored"}
    (pool / "pool.json").write_text(json.dumps(facts, indent=2) + "\n")
    records = entry(KEYS["one"], 7, 3 * PAGE, b"abc") + entry(KEYS["two"], 8, PAGE, b"defg")
    (HERE / "entries.frame").write_bytes(frame(ENTRIES, 9, ALICE, records, 2, 32))
    (HERE / "segment.header").write_bytes(header(42, BOB))


if __name__ == "__main__":
    main()
