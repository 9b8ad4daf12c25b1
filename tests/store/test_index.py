"""The index against a plain model: every operation in any order, keys and places drawn so that they meet often."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rewarm.store.index import NO_ROW, Index, Places
from rewarm.store.layout import PAGE

KEYS = [bytes([letter]) * size for letter in b"abcdef" for size in (8, 32)]
Place = tuple[int, int]
"""Segment slot and offset."""

keys = st.sampled_from(KEYS)
places = st.tuples(st.integers(0, 3), st.integers(1, 6).map(lambda page: page * PAGE))
entries = st.lists(st.tuples(keys, places), max_size=8)


def facts(key: bytes, place: Place) -> tuple[int, bytes]:
    """Length and checksum that an entry has: they follow from key and place, so that a mix-up shows."""
    seed = zlib.crc32(key + repr(place).encode())
    return 1 + seed % 10_000, seed.to_bytes(16, "little")


def add(index: Index, batch: list[tuple[bytes, Place]]) -> None:
    made = [facts(key, place) for key, place in batch]
    index.add(
        [key for key, _ in batch],
        np.array([place[0] for _, place in batch], np.int64),
        np.array([place[1] for _, place in batch], np.uint64),
        np.array([length for length, _ in made], np.uint32),
        np.frombuffer(b"".join(checksum for _, checksum in made), "V16"),
    )


def place_at(found: Places, i: int) -> Place:
    return int(found.segment[i]), int(found.offset[i])


def expect_entry(found: Places, i: int, key: bytes) -> Place:
    """The place of one answer, whose other fields must be those of that key there."""
    place = place_at(found, i)
    assert (int(found.length[i]), found.checksum[i]) == facts(key, place)
    return place


@dataclass
class Model:
    """Up to two places for each key, in the order in which they came."""

    held: dict[bytes, list[Place]] = field(default_factory=dict)

    def add(self, batch: list[tuple[bytes, Place]]) -> None:
        for key, place in dict(batch).items():  # of a key twice in one batch the last
            copies = self.held.setdefault(key, [])
            if place not in copies and len(copies) < 2:
                copies.append(place)

    def drop(self, goes: set[tuple[bytes, Place]]) -> None:
        for key in list(self.held):
            self.held[key] = [place for place in self.held[key] if (key, place) not in goes]
            if not self.held[key]:
                del self.held[key]

    def everything(self) -> set[tuple[bytes, Place]]:
        return {(key, place) for key, copies in self.held.items() for place in copies}


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index, self.model = Index(), Model()

    @rule(batch=entries)
    def add(self, batch: list[tuple[bytes, Place]]) -> None:
        add(self.index, batch)
        self.model.add(batch)

    @rule(key=keys, place=places)
    def remove_copy(self, key: bytes, place: Place) -> None:
        there = (key, place) in self.model.everything()
        assert self.index.remove_copy(key, *place) == there
        self.model.drop({(key, place)})

    @rule(slot=st.integers(0, 3), offsets=st.lists(st.integers(0, 6).map(lambda page: page * PAGE), max_size=4))
    def remove_places(self, slot: int, offsets: list[int]) -> None:
        goes = {(key, at) for key, at in self.model.everything() if at[0] == slot and at[1] in offsets}
        assert self.index.remove_places(slot, offsets) == len(goes)
        self.model.drop(goes)

    @rule(slots=st.lists(st.integers(0, 4), max_size=3))
    def remove_segments(self, slots: list[int]) -> None:
        before = len(self.model.held)
        self.model.drop({(key, place) for key, place in self.model.everything() if place[0] in slots})
        assert self.index.remove_segments(slots) == before - len(self.model.held)

    @invariant()
    def every_answer_is_that_of_the_model(self) -> None:
        assert len(self.index) == len(self.model.held)
        assert sorted(self.index.keys()) == sorted(self.model.held)
        assert self.index.contains(KEYS).tolist() == [key in self.model.held for key in KEYS]
        found = self.index.places(KEYS)
        for i, key in enumerate(KEYS):
            copies = self.model.held.get(key, [])
            assert self.index.has(key) == bool(copies) == (found.row[i] != NO_ROW)
            if copies:
                assert expect_entry(found, i, key) == copies[0]
                self.second_copy_is_the_other(key, int(found.row[i]), copies[1:])
        for slot in range(5):
            assert self.index.in_segment(slot) == sum(place[0] == slot for _, place in self.model.everything())

    def second_copy_is_the_other(self, key: bytes, first_row: int, rest: list[Place]) -> None:
        row = self.index.second(key, first_row)
        assert (row != NO_ROW) == bool(rest)
        if rest:
            assert expect_entry(self.index.places_of(np.array([row])), 0, key) == rest[0]
            assert self.index.second(key, row) == first_row


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_it_grows_and_uses_freed_rows_again() -> None:
    index = Index()
    many = [(number.to_bytes(8, "little"), (number % 7, (1 + number) * PAGE)) for number in range(5000)]
    for start in range(0, 5000, 1700):
        add(index, many[start : start + 1700])
    assert index.remove_segments([0, 3]) == sum(place[0] in (0, 3) for _, place in many)
    add(index, [(key, (9, place[1])) for key, place in many if place[0] in (0, 3)])
    found = index.places([key for key, _ in many])
    assert (found.row != NO_ROW).all()
    assert found.row.max() < 5000, "freed rows are used again"
    for i, (key, (slot, offset)) in enumerate(many):
        assert expect_entry(found, i, key) == (9 if slot in (0, 3) else slot, offset)


def test_the_last_page_that_an_entry_may_lie_on() -> None:
    index = Index()
    place = (2**32 - 2, (1 << 44) - PAGE)
    add(index, [(KEYS[0], place)])
    assert expect_entry(index.places([KEYS[0]]), 0, KEYS[0]) == place


@given(batch=entries)
def test_a_batch_is_as_good_as_its_entries_one_by_one(batch: list[tuple[bytes, Place]]) -> None:
    last = list(dict(batch).items())
    at_once, one_by_one = Index(), Index()
    add(at_once, batch)
    for entry in last:
        add(one_by_one, [entry])
    for key, place in last:
        found = at_once.places([key])
        assert expect_entry(found, 0, key) == expect_entry(one_by_one.places([key]), 0, key) == place
    assert len(at_once) == len(one_by_one) == len(last)


def test_an_empty_index_answers() -> None:
    index = Index()
    assert index.places(KEYS).row.tolist() == [NO_ROW] * len(KEYS)
    assert index.places([]).row.tolist() == []
    assert not index.contains(KEYS).any()
    assert index.contains([]).tolist() == []
    assert index.second(KEYS[0], 0) == NO_ROW
    assert index.remove_segments([0]) == 0
    assert index.remove_places(0, [PAGE, (1 << 64) - 1]) == 0
    assert not index.remove_copy(KEYS[0], 0, PAGE)
    add(index, [])
    assert len(index) == 0
