"""Format 1: the code and docs/reference/format-1.md agree, by golden files that a second reading of the page made.

`golden/make.py` shares no code with the package. Decoding takes anything: what is not valid is no frame, never an
exception.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewarm.store import layout
from rewarm.store.contract import Store
from rewarm.store.layout import PAGE, Kind
from rewarm.store.opening import open_store
from rewarm.store.pool import PoolFacts, decode_facts, encode_facts

GOLDEN = Path(__file__).parent / "golden"
POOL_ID = bytes(range(0x10, 0x20))
ALICE, BOB = "a1" * 16, "b0" * 16
SIZES = {"one": 5000, "two": 4096, "three": 1, "four": 12_345}
SHORT_KEY = b"8 bytes."


def key_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def block_of(key: bytes, size: int) -> bytes:
    return hashlib.shake_128(key).digest(size)


HELD = {key_of(name): block_of(key_of(name), size) for name, size in SIZES.items()}
HELD[SHORT_KEY] = block_of(SHORT_KEY, 77)


def encode_again(frame: layout.Frame) -> bytes:
    """A frame from the fields of another."""
    size = {Kind.ENTRIES: frame.key_bytes + 40, Kind.OPEN: 32, Kind.COUNTER: 0}.get(Kind(frame.kind), 32)
    records = bytes(frame.body[: frame.count * size])
    return layout.encode_frame(
        frame.kind,
        frame.epoch,
        frame.sequence,
        frame.writer,
        records,
        frame.count,
        namespace=frame.namespace,
        key_bytes=frame.key_bytes,
    )


# The golden files.


def test_the_golden_frame_says_what_it_says() -> None:
    raw = (GOLDEN / "entries.frame").read_bytes()
    frame = layout.decode_frame(memoryview(raw))
    assert frame is not None
    assert (frame.kind, frame.epoch, frame.sequence, frame.count, frame.key_bytes) == (Kind.ENTRIES, 1, 9, 2, 32)
    assert frame.writer.hex() == ALICE
    assert frame.namespace == hashlib.sha256(b"rewarm namespace 1\0golden").digest()
    first, second = frame.entries()
    assert (bytes(first["key"]), bytes(second["key"])) == (key_of("one"), key_of("two"))
    assert (first["segment"], first["offset"], first["length"]) == (7, 3 * PAGE, 3)
    assert (second["segment"], second["offset"], second["length"]) == (8, PAGE, 4)
    assert [entry["checksum"].tobytes() for entry in (first, second)] == [layout.digest(b"abc"), layout.digest(b"defg")]
    assert encode_again(frame) == raw


def test_the_golden_header_is_written_as_it_is_read() -> None:
    raw = (GOLDEN / "segment.header").read_bytes()
    assert layout.encode_segment_header(42, bytes.fromhex(BOB), POOL_ID) == raw
    assert layout.segment_header_is(raw, 42, bytes.fromhex(BOB))
    assert not layout.segment_header_is(raw, 41, bytes.fromhex(BOB))
    assert not layout.segment_header_is(raw, 42, bytes.fromhex(ALICE))


def test_the_checksum_is_xxh3_128_in_its_own_order() -> None:
    assert layout.digest(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_the_golden_logs_are_encoded_byte_for_byte() -> None:
    kinds = []
    for log in sorted((GOLDEN / "pool" / "writers").glob("*/*.log")):
        raw = log.read_bytes()
        for at, frame in layout.scan_frames(memoryview(raw)):
            kinds.append(frame.kind)
            if frame.kind in set(Kind):
                assert encode_again(frame) == raw[at : at + frame.bytes_total]
    assert kinds == [1, 2, 3, 2, 2, 4, 5, 1, 6, 99, 2]


def test_the_golden_pool_file() -> None:
    path = GOLDEN / "pool" / "pool.json"
    facts = decode_facts(path.read_bytes(), path)
    assert facts == PoolFacts(1, POOL_ID.hex(), 8 << 20, 128 << 10, "private", "golden")
    assert decode_facts(encode_facts(facts), path) == facts


@pytest.fixture
def golden_pool(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "pool", tmp_path / "pool"))


def load_all(store: Store) -> None:
    """Everything that the golden pool holds is a hit, right to the last byte."""
    buffers = [bytearray(len(data)) for data in HELD.values()]
    transfer = store.load(list(HELD), buffers)
    assert transfer.wait(60) == [True] * len(HELD), transfer.outcomes
    assert [bytes(buffer) for buffer in buffers] == list(HELD.values())


def test_the_golden_pool_is_served(golden_pool: Path) -> None:
    before = {path: path.read_bytes() for path in golden_pool.rglob("*") if path.is_file()}
    with open_store(golden_pool, namespace="golden") as store:
        assert store.stats().blocks == len(HELD)
        load_all(store)
        assert not store.lookup([key_of("evicted"), key_of("damaged")]).mask.any()
    assert {path: path.read_bytes() for path in golden_pool.rglob("*") if path.is_file()} == before


def test_the_golden_pool_goes_on(golden_pool: Path) -> None:
    again = key_of("damaged")
    with open_store(golden_pool, namespace="golden") as store:
        assert store.save([again], [block_of(again, 3000)]).wait(60) == [True]
    with open_store(golden_pool, namespace="golden") as store:
        load_all(store)
        buffer = bytearray(3000)
        assert store.load([again], [buffer]).wait(60) == [True]
        assert buffer == block_of(again, 3000)
        report = store.check()
    kinds = [finding.kind for finding in report.findings if finding.kind != "wrong_access"]  # git keeps no modes
    assert kinds == ["damaged_log"], "the page of damage in Bob's log"


def test_another_namespace_sees_nothing_of_it(golden_pool: Path) -> None:
    with open_store(golden_pool) as store:
        assert store.stats().blocks == 0
        assert not store.lookup(list(HELD)).mask.any()


# Any bytes.

writers = st.binary(min_size=16, max_size=16)
sequences = st.integers(0, 2**64 - 1)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame of any kind with any records that it may have."""
    kind = draw(st.sampled_from([*Kind, 0, 99]))
    count = 0 if kind == Kind.COUNTER else draw(st.integers(0, 40))
    key_bytes = draw(st.integers(8, 64)) if kind == Kind.ENTRIES else 0
    size = {Kind.ENTRIES: key_bytes + 40, Kind.COUNTER: 0}.get(kind, 32)
    records = draw(st.binary(min_size=count * size, max_size=count * size))
    return layout.encode_frame(
        kind,
        draw(sequences),
        draw(sequences),
        draw(writers),
        records,
        count,
        namespace=draw(st.binary(min_size=32, max_size=32)),
        key_bytes=key_bytes,
    )


def use(frame: layout.Frame) -> None:
    """Read a frame as the tailer does; nothing may raise."""
    if frame.kind == Kind.ENTRIES:
        entries = frame.entries()
        assert len(entries) == frame.count == len(layout.entry_mask(entries)) == len(entries["key"].tolist())
    elif frame.kind == Kind.OPEN:
        frame.opening()
    elif frame.kind in (Kind.SEALED, Kind.EVICTED, Kind.DROPPED, Kind.ROLLED):
        assert len(frame.references()) == frame.count


@given(raw=frames())
def test_what_is_encoded_is_decoded(raw: bytes) -> None:
    assert len(raw) % PAGE == 0
    frame = layout.decode_frame(memoryview(raw))
    assert frame is not None
    assert frame.bytes_total == len(raw) == layout.frame_bytes_claimed(memoryview(raw), 0)
    use(frame)
    if frame.kind in set(Kind):
        assert encode_again(frame) == raw


@given(raw=frames(), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_wrong_bit_is_no_frame(raw: bytes, at: float, bit: int) -> None:
    damaged = bytearray(raw)
    damaged[int(at * len(raw))] ^= 1 << bit
    assert layout.decode_frame(memoryview(damaged)) is None


@given(raw=frames(), keep=st.floats(0, 1, exclude_max=True))
def test_a_frame_that_is_cut_is_no_frame(raw: bytes, keep: float) -> None:
    assert layout.decode_frame(memoryview(raw[: int(keep * len(raw))])) is None


def sealed_again(content: bytearray) -> bytes:
    """The same bytes under a checksum that holds: what only a hostile or a broken writer makes."""
    total = int.from_bytes(content[8:12], "little")
    if total % PAGE == 0 and PAGE <= total <= len(content):
        content[total - 16 : total] = layout.digest(bytes(content[: total - 16]))
    return bytes(content)


@settings(max_examples=300)
@given(raw=frames(), where=st.integers(8, 127), patch=st.binary(min_size=1, max_size=8))
@example(raw=layout.encode_frame(Kind.ENTRIES, 1, 1, bytes(16), b"", 0, key_bytes=8), where=80, patch=b"\xff" * 4)
@example(raw=layout.encode_frame(Kind.EVICTED, 1, 1, bytes(16), b"", 0), where=80, patch=b"\xff" * 4)
@example(raw=layout.encode_frame(Kind.ENTRIES, 1, 1, bytes(16), b"", 0, key_bytes=8), where=84, patch=b"\0\0")
def test_a_header_that_lies_under_a_right_checksum_raises_nothing(raw: bytes, where: int, patch: bytes) -> None:
    content = bytearray(raw)
    content[where : where + len(patch)] = patch
    frame = layout.decode_frame(memoryview(sealed_again(content)))
    if frame is not None:
        assert PAGE <= frame.bytes_total <= len(raw)
        use(frame)


@given(raw=st.binary(max_size=3 * PAGE), at=st.integers(0, 2 * PAGE))
def test_noise_raises_nothing(raw: bytes, at: int) -> None:
    for data in (raw, layout.FRAME_MAGIC + raw):
        assert layout.decode_frame(memoryview(data), at) is None
        assert layout.frame_bytes_claimed(memoryview(data), at) % PAGE == 0
        assert list(layout.scan_frames(memoryview(data))) == []
        assert not layout.segment_header_is(data, 1, bytes(16))


@given(parts=st.lists(st.one_of(frames(), st.integers(1, 3)), max_size=6))
def test_a_scan_finds_every_frame_between_damage(parts: list[bytes | int]) -> None:
    content, placed = b"", []
    for part in parts:
        if isinstance(part, int):
            content += b"\x55" * (part * PAGE)
        else:
            placed.append((len(content), part))
            content += part
    found = list(layout.scan_frames(memoryview(content)))
    assert [(at, content[at : at + frame.bytes_total]) for at, frame in found] == placed
    assert {at for at, _ in placed} <= set(layout.magic_pages(memoryview(content)))


def test_the_largest_frame_holds_as_many_entries_as_it_says() -> None:
    for key_bytes in (8, 32, 64):
        count = layout.entries_per_frame(key_bytes)
        entries = np.zeros(count, layout.entry_dtype(key_bytes))
        raw = layout.encode_frame(Kind.ENTRIES, 1, 1, bytes(16), entries.tobytes(), count, key_bytes=key_bytes)
        assert len(raw) == layout.FRAME_BYTES_MAX
        frame = layout.decode_frame(memoryview(raw))
        assert frame is not None
        assert len(frame.entries()) == count


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, True),
        ({"offset": 0}, False),
        ({"offset": PAGE + 1}, False),
        ({"offset": 1 << 44}, False),
        ({"offset": 2**64 - PAGE}, False),
        ({"length": 0}, False),
        ({"length": layout.BLOCK_BYTES_MAX}, True),
        ({"length": layout.BLOCK_BYTES_MAX + 1}, False),
        ({"length": 2**32 - 1}, False),
        ({"generation": 1}, False),
        ({"flags": 77}, True),
    ],
)
def test_entries_that_a_reader_may_take(changes: dict[str, int], allowed: bool) -> None:
    entry = np.zeros(1, layout.entry_dtype(32))
    entry["offset"], entry["length"] = PAGE, 1
    for name, value in changes.items():
        entry[name] = value
    assert layout.entry_mask(entry).tolist() == [allowed]


@given(count=st.integers(0, 1 << 31))
def test_pages_round_up(count: int) -> None:
    assert layout.pages(count) % PAGE == 0
    assert count <= layout.pages(count) < count + PAGE
