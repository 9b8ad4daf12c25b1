"""The table of segments: what is gone stays gone, keeps its name and its slot, and takes next to no memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from tests.store.test_eviction import CAPACITY, STORED, open_pool, save

from rewarm.store.file import FileStore
from rewarm.store.pool import Pool, PoolFacts
from rewarm.store.segments import NO_SLOT, SegmentTable
from rewarm.testing import make_keys

A, B = "a1" * 16, "b2" * 16


def table() -> SegmentTable:
    return SegmentTable(Pool(Path("/nowhere"), PoolFacts(1, "00" * 16, CAPACITY, CAPACITY // 64)))


def test_what_is_gone_keeps_its_name_and_its_slot() -> None:
    known = table()
    first, second, other = known.get(A, 1), known.get(A, 2), known.get(B, 1)
    assert [first.slot, second.slot, other.slot] == [0, 1, 2]
    assert known.get(A, 2) is second is known[1]
    first.gone = True
    known.bury(first)
    assert known.of_writer(A) == [second]
    by_name, by_slot = known.get(A, 1), known[0]
    assert (by_name.gone, by_name.slot) == (True, NO_SLOT)
    assert (by_slot.gone, by_slot.slot, by_slot.path) == (True, 0, first.path)
    assert (by_slot.writer, by_slot.number) == (A, 1)
    assert not known.get(A, 3).gone
    assert not other.gone


def test_segments_may_go_in_any_order_and_twice() -> None:
    known = table()
    for number in (0, 3, 1, 1, 5, 2, 0):
        known.bury(known.get(A, number))
    assert [known.get(A, number).gone for number in range(7)] == [True, True, True, True, False, True, False]
    assert [one.number for one in known.of_writer(A)] == [4, 6]


def test_what_is_gone_takes_next_to_no_memory() -> None:
    known, count = table(), 20_000
    tracemalloc.start()
    try:
        for number in range(1, count + 1):
            known.bury(known.get(A, number))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 16 * count


def test_a_handle_that_evicts_for_long_remembers_the_names_alone(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store, open_pool(tmp_path) as other:
        assert isinstance(store, FileStore)
        assert isinstance(other, FileStore)
        for turn in range(4):
            assert save(store, make_keys(4, f"turn {turn}")) == [STORED] * 4
        other.refresh()
        store.flush()
        store.evict(0)
        other.refresh()
        (writer,) = store._tailer.own_writers
        for one in (store, other):
            mine = one.segments._writers[writer]
            assert (mine.gone_to, mine.gone, sorted(mine.live)) == (3, set(), [4]), "the last is still open"
