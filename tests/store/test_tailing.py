"""What others wrote, whatever it is: published blocks become visible, lies and nonsense cost nobody anything."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.store.faulty_store import WAIT_S

from rewarm.store import layout, log
from rewarm.store.contract import EMPTY_NAMESPACE, Outcome, Store
from rewarm.store.file import FileStore
from rewarm.store.layout import PAGE, SEGMENT_GONE, Kind
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

CAPACITY = 16 << 20
SIZE = 5000
HIT, MISSING, CORRUPT = Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT


def open_pool(root: Path, options: str = "&poll=1h", *, namespace: object = None) -> FileStore:
    store = open_store(f"file://{root}?capacity={CAPACITY}{options}", namespace=namespace)
    assert isinstance(store, FileStore)
    return store


def save(store: Store, keys: list[bytes]) -> list[Outcome | None]:
    transfer = store.save(keys, [payload(key, SIZE) for key in keys])
    transfer.wait(WAIT_S)
    return transfer.outcomes


def load(store: Store, keys: list[bytes], size: int = SIZE) -> list[Outcome | None]:
    buffers = [bytearray(size) for _ in keys]
    transfer = store.load(keys, buffers)
    transfer.wait(WAIT_S)
    for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
        assert outcome is not HIT or buffer == payload(key, size), "wrong bytes"
    return transfer.outcomes


class Forger:
    """Writes a writer's directory by hand: valid frames that say whatever a test wants."""

    def __init__(self, root: Path, *, pool_id: bytes = bytes(16)) -> None:
        self.id = uuid.uuid4().hex
        self.folder = root / "writers" / self.id
        self.folder.mkdir(parents=True)
        self._sequence = 0
        self.frame(Kind.OPEN, layout.encode_open(pool_id, 1, 1), 1)

    def frame(self, kind: int, records: bytes, count: int, **facts: object) -> None:
        """Append one frame."""
        self._sequence += 1
        writer = bytes.fromhex(self.id)
        raw = layout.encode_frame(kind, 1, self._sequence, writer, records, count, **facts)  # type: ignore[arg-type]
        self.raw(raw)

    def raw(self, content: bytes) -> None:
        """Append anything."""
        with open(self.folder / "00000001.log", "ab") as log:
            log.write(content)

    def entry(self, key: bytes, segment: int, offset: int, length: int, data: bytes, *, generation: int = 0) -> None:
        """Append a frame with one entry."""
        one = np.zeros(1, layout.entry_dtype(len(key)))
        one["key"], one["segment"], one["offset"], one["length"] = np.void(key), segment, offset, length
        one["generation"], one["checksum"] = generation, np.void(layout.digest(data))
        self.frame(Kind.ENTRIES, one.tobytes(), 1, namespace=EMPTY_NAMESPACE, key_bytes=len(key))

    def refer(self, kind: int, segment: int, offset: int, writer: str = "") -> None:
        """Append a SEALED, EVICTED or DROPPED frame."""
        self.frame(kind, layout.encode_reference(bytes.fromhex(writer or self.id), segment, offset), 1)

    def segment(self, number: int, content: bytes) -> None:
        """Write a segment's file: a page, then `content`."""
        (self.folder / f"{number:08d}.seg").write_bytes(bytes(PAGE) + content + bytes(-len(content) % PAGE))


# Honest writers.


def test_what_others_publish_is_visible_after_a_refresh(tmp_path: Path) -> None:
    with open_pool(tmp_path) as one, open_pool(tmp_path) as other:
        for turn in range(3):
            keys = make_keys(5, str(turn))
            save(one, keys)
            assert not other.lookup(keys).mask.any()
            other.refresh()
            assert load(other, keys) == [HIT] * 5
            assert save(other, keys) == [Outcome.ALREADY] * 5


def test_a_poll_is_enough(tmp_path: Path) -> None:
    with open_pool(tmp_path) as one, open_pool(tmp_path, "&poll=10ms") as other:
        keys = make_keys(5)
        save(one, keys)
        deadline, pause = time.monotonic() + WAIT_S, threading.Event()
        while other.lookup(keys).leading < 5:
            pause.wait(0.005)
            assert time.monotonic() < deadline, "the poller does not poll"
        assert load(other, keys) == [HIT] * 5


def test_a_writer_that_goes_takes_its_blocks_along(tmp_path: Path) -> None:
    keys = make_keys(5)
    with open_pool(tmp_path) as one:
        save(one, keys)
    with open_pool(tmp_path) as other:
        assert other.lookup(keys).leading == 5
        shutil.rmtree(tmp_path / "writers" / os.listdir(tmp_path / "writers")[0])
        other.refresh()
        assert not other.lookup(keys).mask.any()


def test_own_blocks_go_with_their_directory_before_the_first_refresh(tmp_path: Path) -> None:
    keys = make_keys(3)
    with open_pool(tmp_path) as store:
        assert save(store, keys) == [Outcome.STORED] * 3
        (own,) = os.listdir(tmp_path / "writers")
        (tmp_path / "writers" / own).rename(tmp_path / "aside")
        store.refresh()
        assert not store.lookup(keys).mask.any()
        (tmp_path / "aside").rename(tmp_path / "writers" / own)
        store.refresh()
        assert load(store, keys) == [HIT] * 3, "it may come back with its mount"


@pytest.mark.parametrize("tick_s", [2.0, 0.0])
def test_files_that_come_back_within_a_tick_of_the_clock(
    tmp_path: Path, tick_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of a directory advance every few milliseconds on many kernels, every second or two on some servers."""
    monkeypatch.setattr(log, "TICK_S", tick_s)
    keys = make_keys(3)
    with open_pool(tmp_path) as one, open_pool(tmp_path) as other:
        assert save(one, keys) == [Outcome.STORED] * 3
        other.refresh()
        (segment,) = (tmp_path / "writers").glob("*/*.seg")
        segment.rename(tmp_path / "aside")
        gone_ns = segment.parent.stat().st_mtime_ns
        for store in (one, other):
            assert load(store, keys) == [Outcome.MISSING] * 3
            store.refresh()
            assert not store.lookup(keys).mask.any()
        (tmp_path / "aside").rename(segment)
        os.utime(segment.parent, ns=(gone_ns, gone_ns))
        for store in (one, other):
            store.refresh()
            assert store.lookup(keys).mask.all() == (tick_s > 0), "what shows no change later is not listed again"
            if tick_s:
                assert load(store, keys) == [HIT] * 3


def test_a_log_that_cannot_be_read_is_said_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(5)
    with open_pool(tmp_path) as one, open_pool(tmp_path) as other:
        save(one, keys)
        preadv = os.preadv

        def refuse(*_: object) -> int:
            raise OSError(5, "no luck")

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            other.refresh()
            assert "1 logs could not be read" in other.stats().notes
            assert not other.lookup(keys).mask.any()
        assert os.preadv is preadv
        other.refresh()
        assert other.lookup(keys).leading == 5
        assert other.stats().notes == []


# Lies.


def test_a_forged_block_that_is_right_is_served(tmp_path: Path) -> None:
    """The forger's frames are good: so are the tests below, whose blocks must not be."""
    key = make_keys(1)[0]
    with open_pool(tmp_path) as store:
        forger = Forger(tmp_path, pool_id=b"another pool id!")
        forger.segment(1, payload(key, SIZE))
        forger.entry(key, 1, PAGE, SIZE, payload(key, SIZE))
        store.refresh()
        assert load(store, [key]) == [HIT]


@pytest.mark.parametrize(
    ("segment", "offset", "length", "generation"),
    [
        (1, 0, SIZE, 0),
        (1, PAGE + 1, SIZE, 0),
        (1, PAGE // 2, SIZE, 0),
        (1, 1 << 44, SIZE, 0),
        (1, (1 << 64) - PAGE, SIZE, 0),
        (1, PAGE, 0, 0),
        (1, PAGE, (1 << 30) + 1, 0),
        (1, PAGE, (1 << 32) - 1, 0),
        (1, PAGE, SIZE, 1),
    ],
)
def test_impossible_entries_are_not_taken(
    tmp_path: Path, segment: int, offset: int, length: int, generation: int
) -> None:
    key = make_keys(1)[0]
    with open_pool(tmp_path) as store:
        forger = Forger(tmp_path)
        forger.segment(1, payload(key, SIZE))
        forger.entry(key, segment, offset, length, payload(key, SIZE), generation=generation)
        store.refresh()
        assert key not in store
        assert save(store, [key]) == [Outcome.STORED]


@pytest.mark.parametrize(
    ("segment", "offset", "outcome"),
    [
        (1, 2 * PAGE, CORRUPT),
        (1, 100 * PAGE, CORRUPT),
        (1, (1 << 44) - PAGE, CORRUPT),
        (2, PAGE, MISSING),
        (4_000_000_000, PAGE, MISSING),
        (0, PAGE, MISSING),
    ],
)
def test_entries_that_point_nowhere_are_misses(tmp_path: Path, segment: int, offset: int, outcome: Outcome) -> None:
    key = make_keys(1)[0]
    with open_pool(tmp_path) as store:
        forger = Forger(tmp_path)
        forger.segment(1, payload(key, SIZE))
        forger.entry(key, segment, offset, SIZE, payload(key, SIZE))
        store.refresh()
        assert load(store, [key]) in ([outcome], [MISSING])
        assert key not in store
        assert save(store, [key]) == [Outcome.STORED]
        assert load(store, [key]) == [HIT]


def test_an_entry_beyond_a_sealed_size_is_not_taken(tmp_path: Path) -> None:
    keys = make_keys(2)
    with open_pool(tmp_path) as store:
        forger = Forger(tmp_path)
        forger.segment(1, payload(keys[0], SIZE) + bytes(-SIZE % PAGE) + payload(keys[1], SIZE))
        forger.refer(Kind.SEALED, 1, 3 * PAGE)
        forger.entry(keys[0], 1, PAGE, SIZE, payload(keys[0], SIZE))
        forger.entry(keys[1], 1, 3 * PAGE, SIZE, payload(keys[1], SIZE))
        store.refresh()
        assert store.lookup(keys).mask.tolist() == [True, False]


def test_overlapping_entries_and_one_place_under_two_keys(tmp_path: Path) -> None:
    right, wrong = make_keys(2)
    data = payload(right, 3 * PAGE)
    with open_pool(tmp_path) as store:
        forger = Forger(tmp_path)
        forger.segment(1, data)
        forger.entry(right, 1, PAGE, 3 * PAGE, data)
        forger.entry(wrong, 1, 2 * PAGE, 3 * PAGE, data)
        store.refresh()
        assert load(store, [right, wrong], 3 * PAGE) == [HIT, CORRUPT]


def test_lies_about_segments_of_others_cost_no_more_than_they_name(tmp_path: Path) -> None:
    keys = make_keys(6)
    with open_pool(tmp_path) as one, open_pool(tmp_path) as other:
        save(one, keys)
        assert one._writes.appender.writer is not None
        owner = one._writes.appender.writer.id
        other.refresh()
        forger = Forger(tmp_path)
        forger.refer(Kind.SEALED, 1, 0, owner)
        forger.refer(Kind.EVICTED, 1, PAGE, owner)
        forger.refer(Kind.EVICTED, 99, SEGMENT_GONE, owner)
        forger.refer(Kind.DROPPED, 1, PAGE, owner)
        forger.refer(Kind.DROPPED, 1, SEGMENT_GONE, owner)
        forger.refer(Kind.DROPPED, 1, (1 << 63) + PAGE, owner)
        forger.refer(Kind.ROLLED, 7, 0, owner)
        forger.frame(99, b"of a later version", 1)
        other.refresh()
        assert load(other, keys) == [MISSING] + [HIT] * 5, "the one that is said to be damaged"
        assert load(one, keys) == [HIT] * 6, "until its owner reads it too"


def test_an_open_segment_that_is_said_to_be_evicted_is_left(tmp_path: Path) -> None:
    keys = make_keys(6)
    with open_pool(tmp_path) as store:
        save(store, keys[:3])
        assert store._writes.appender.writer is not None
        Forger(tmp_path).refer(Kind.EVICTED, 1, SEGMENT_GONE, store._writes.appender.writer.id)
        store.refresh()
        assert load(store, keys[:3]) == [MISSING] * 3
        assert save(store, keys) == [Outcome.STORED] * 6
        assert load(store, keys) == [HIT] * 6


def test_a_log_full_of_drops_and_evictions_of_the_unknown(tmp_path: Path) -> None:
    dice = random.Random(4)
    count = 30_000
    with open_pool(tmp_path) as store:
        save(store, make_keys(100))
        forger = Forger(tmp_path)
        for kind in (Kind.DROPPED, Kind.EVICTED):
            records = b"".join(
                layout.encode_reference(dice.randbytes(16), dice.getrandbits(32), SEGMENT_GONE) for _ in range(count)
            )
            forger.frame(kind, records, count)
        store.refresh()
        assert load(store, make_keys(100)) == [HIT] * 100


def test_a_log_of_zeros_with_a_frame_far_behind(tmp_path: Path) -> None:
    key = make_keys(1)[0]
    with open_pool(tmp_path) as store:
        forger = Forger(tmp_path)
        forger.segment(1, payload(key, SIZE))
        os.truncate(forger.folder / "00000001.log", 1 << 30)
        store.refresh()
        assert key not in store
        forger.entry(key, 1, PAGE, SIZE, payload(key, SIZE))
        store.refresh()
        assert load(store, [key]) == [HIT]


frames_of_any_kind = st.tuples(st.integers(0, 9), st.binary(min_size=0, max_size=200), st.integers(0, 2**32 - 1))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(frames_of_any_kind, max_size=6), patch=st.tuples(st.integers(12, 127), st.binary(max_size=4)))
def test_frames_of_nonsense_under_right_checksums(
    tmp_path: Path, frames: list[tuple[int, bytes, int]], patch: tuple[int, bytes]
) -> None:
    keys = make_keys(3)
    root = tmp_path / uuid.uuid4().hex
    root.mkdir()
    with open_pool(root) as store:
        save(store, keys)
        forger = Forger(root)
        for kind, records, count in frames:
            raw = bytearray(layout.encode_frame(kind, 1, 9, bytes.fromhex(forger.id), records, count, key_bytes=8))
            raw[patch[0] : patch[0] + len(patch[1])] = patch[1]
            raw[-16:] = layout.digest(bytes(raw[:-16]))
            forger.raw(bytes(raw))
        store.refresh()
        store.check()
        assert load(store, keys) == [HIT] * 3
