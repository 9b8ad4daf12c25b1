"""Who sees which block, and which blocks go: namespaces, handles of one pool, capacity, eviction, pins, erasing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from rewarm.errors import ConfigError
from rewarm.store.contract import Outcome, Store
from rewarm.testing.kit.base import (
    BLOCK_BYTES,
    SMALL_CAPACITY_BYTES,
    WAIT_S,
    StoreKit,
    blocks_of,
    destinations,
    finish,
    load,
    save,
)
from rewarm.testing.payload import make_keys, payload

HALF_FULL = SMALL_CAPACITY_BYTES // BLOCK_BYTES // 2
"""Blocks that fill half of a small pool."""


class _Described:
    """A namespace as `rewarm.geometry` makes them."""

    digest = hashlib.sha256(b"a model").digest()

    def describe(self) -> str:
        return "a model"


def _save_in_batches(store: Store, keys: Sequence[bytes], batch: int = 16) -> list[Outcome | None]:
    outcomes: list[Outcome | None] = []
    for start in range(0, len(keys), batch):
        outcomes += save(store, keys[start : start + batch])
    return outcomes


class SpaceTests(StoreKit):
    """Namespaces, capacity, eviction."""

    def test_namespaces_do_not_see_each_other(self) -> None:
        names = ["first", "second", b"first\0", None, _Described()]
        stores = [self.open(name) for name in names]
        key = make_keys(1)[0]
        blocks = [payload(f"block of {index}".encode(), BLOCK_BYTES) for index in range(len(names))]
        for index, (store, block) in enumerate(zip(stores, blocks, strict=True)):
            for other in stores:
                other.refresh()
            assert [key in other for other in stores] == [i < index for i in range(len(stores))]
            transfer = store.save([key], [block])
            finish(transfer)
            assert transfer.outcomes == [Outcome.STORED]
        for store, block in zip(stores, blocks, strict=True):
            buffer = bytearray(BLOCK_BYTES)
            assert finish(store.load([key], [buffer])) == [True]
            assert buffer == block

    def test_one_namespace_may_be_spelled_as_text_or_bytes(self) -> None:
        text, raw, keys = self.open("model"), self.open(b"model"), make_keys(2)
        save(text, keys)
        raw.refresh()
        assert load(raw, keys) == [Outcome.HIT] * 2

    @pytest.mark.parametrize("bad", ["", b"", 7, ["a"]])
    def test_a_bad_namespace_is_refused(self, bad: object) -> None:
        with pytest.raises(ConfigError):
            self.open(bad)

    def test_handles_of_one_pool_see_each_other(self) -> None:
        first, second, keys = self.open("shared"), self.open("shared"), make_keys(12)
        save(first, keys[:4])
        save(second, keys[4:8])
        for store in (first, second):
            store.refresh()
            assert load(store, keys[:8]) == [Outcome.HIT] * 8
            assert save(store, keys[:8]) == [Outcome.ALREADY] * 8
        third = self.open("shared")
        assert load(third, keys[:8]) == [Outcome.HIT] * 8
        first.close()
        assert save(third, keys[8:]) == [Outcome.STORED] * 4
        second.refresh()
        assert load(second, keys) == [Outcome.HIT] * 12

    def test_a_pool_stays_within_its_capacity(self) -> None:
        store = self.open(capacity_bytes=SMALL_CAPACITY_BYTES)
        keys = make_keys(3 * HALF_FULL)
        for start in range(0, len(keys), 16):
            batch = keys[start : start + 16]
            assert save(store, batch) == [Outcome.STORED] * 16
            assert load(store, batch) == [Outcome.HIT] * 16, "what was saved last goes last"
            stats = store.stats()
            assert stats.used_bytes <= stats.capacity_bytes == SMALL_CAPACITY_BYTES
        kept = store.lookup(keys).mask
        assert not kept[:HALF_FULL].any(), "the oldest go first"
        assert HALF_FULL <= kept.sum() <= 2 * HALF_FULL
        assert stats.evicted_bytes >= (len(keys) - kept.sum()) * BLOCK_BYTES
        outcomes = load(store, keys)
        assert [outcome is Outcome.HIT for outcome in outcomes] == kept.tolist()
        assert set(outcomes) == {Outcome.HIT, Outcome.MISSING}

    def test_nothing_is_evicted_below_capacity(self) -> None:
        store = self.open(capacity_bytes=SMALL_CAPACITY_BYTES)
        keys = make_keys(HALF_FULL)
        _save_in_batches(store, keys)
        assert load(store, keys) == [Outcome.HIT] * HALF_FULL
        assert store.stats().evicted_bytes == 0

    def test_a_block_larger_than_the_pool_is_refused(self) -> None:
        store, keys = self.open(capacity_bytes=SMALL_CAPACITY_BYTES), make_keys(2)
        save(store, keys[:1])
        transfer = store.save(keys[1:], [bytes(SMALL_CAPACITY_BYTES + 1)])
        assert finish(transfer) == [False]
        assert transfer.outcomes == [Outcome.REFUSED_FULL]
        assert store.stats().refused[Outcome.REFUSED_FULL] == 1
        assert keys[1] not in store
        assert load(store, keys[:1]) == [Outcome.HIT]

    def test_saves_over_the_budget_are_refused_not_waited_for(self) -> None:
        store, keys = self.open(queue_bytes=1 << 20), make_keys(3)
        transfer = store.save(keys[:1], [bytes(2 << 20)])
        assert finish(transfer) == [False]
        assert transfer.outcomes == [Outcome.REFUSED_BUDGET]
        assert store.stats().refused[Outcome.REFUSED_BUDGET] == 1
        assert keys[0] not in store
        assert save(store, keys[1:]) == [Outcome.STORED] * 2
        assert store.stats().queued_bytes == 0

    def test_a_batch_over_the_budget_is_kept_in_part(self) -> None:
        store, keys = self.open(queue_bytes=4 * BLOCK_BYTES), make_keys(64)
        outcomes = save(store, keys)
        assert set(outcomes) <= {Outcome.STORED, Outcome.REFUSED_BUDGET}
        assert outcomes[:4] == [Outcome.STORED] * 4
        assert store.lookup(keys).mask.tolist() == [outcome is Outcome.STORED for outcome in outcomes]
        assert store.stats().refused[Outcome.REFUSED_BUDGET] == outcomes.count(Outcome.REFUSED_BUDGET)

    def test_evict_drops_the_oldest(self) -> None:
        store, keys = self.open(capacity_bytes=SMALL_CAPACITY_BYTES), make_keys(HALF_FULL)
        _save_in_batches(store, keys)
        store.flush()
        before = store.stats().used_bytes
        freed = store.evict(SMALL_CAPACITY_BYTES // 4)
        after = store.stats().used_bytes
        assert after <= SMALL_CAPACITY_BYTES // 4
        assert freed >= before - after > 0, "saying what goes may take a little space"
        kept = store.lookup(keys).mask
        assert kept.any()
        assert not kept[: len(keys) // 4].any()
        assert kept[-1]
        assert [outcome is Outcome.HIT for outcome in load(store, keys)] == kept.tolist()
        assert _save_in_batches(store, keys).count(Outcome.STORED) == (~kept).sum()
        assert load(store, keys) == [Outcome.HIT] * HALF_FULL

    def test_evict_leaves_a_pool_alone_that_is_small_enough(self) -> None:
        store, keys = self.open(capacity_bytes=SMALL_CAPACITY_BYTES), make_keys(16)
        save(store, keys)
        assert store.evict(SMALL_CAPACITY_BYTES) == 0
        assert load(store, keys) == [Outcome.HIT] * 16

    def test_pinned_blocks_are_not_evicted(self) -> None:
        store, keys = self.open(capacity_bytes=SMALL_CAPACITY_BYTES), make_keys(HALF_FULL)
        absent = make_keys(1, "absent")
        _save_in_batches(store, keys)
        pin = store.pin([*keys[:4], *absent])
        assert pin.mask.tolist() == [True] * 4 + [False]
        store.evict(SMALL_CAPACITY_BYTES // 4)
        assert load(store, keys[:4]) == [Outcome.HIT] * 4
        _save_in_batches(store, make_keys(2 * HALF_FULL, "more"))
        assert load(store, keys[:4]) == [Outcome.HIT] * 4
        pin.release()
        pin.release()
        store.evict(SMALL_CAPACITY_BYTES // 8)
        assert load(store, keys[:4]) == [Outcome.MISSING] * 4

    def test_a_block_may_be_pinned_twice(self) -> None:
        store, keys = self.open(capacity_bytes=SMALL_CAPACITY_BYTES), make_keys(HALF_FULL)
        _save_in_batches(store, keys)
        with store.pin(keys[:1]), store.pin(keys[:1]):
            store.evict(0)
        with store.pin(keys[-1:]) as pin:
            pin.release()

    def test_the_first_of_two_pins_may_go(self) -> None:
        store, keys = self.open(capacity_bytes=SMALL_CAPACITY_BYTES), make_keys(HALF_FULL)
        _save_in_batches(store, keys)
        first, second = store.pin(keys[:1]), store.pin(keys[:1])
        first.release()
        store.evict(SMALL_CAPACITY_BYTES // 8)
        assert load(store, keys[:1]) == [Outcome.HIT]
        second.release()

    def test_erase_removes_one_namespace(self) -> None:
        mine, other, keys = self.open("mine"), self.open("other"), make_keys(64)
        save(mine, keys)
        save(other, keys)
        assert mine.erase() > 0
        assert not mine.lookup(keys).mask.any()
        assert load(mine, keys) == [Outcome.MISSING] * 64
        other.refresh()
        assert load(other, keys) == [Outcome.HIT] * 64
        assert mine.erase() == 0

    def test_erase_removes_what_other_handles_wrote(self) -> None:
        first, second, keys = self.open("shared"), self.open("shared"), make_keys(32)
        save(first, keys[:16])
        save(second, keys[16:])
        first.refresh()
        first.erase()
        second.refresh()
        for store in (first, second, self.open("shared")):
            assert not store.lookup(keys).mask.any()
            assert load(store, keys) == [Outcome.MISSING] * 32

    def test_a_handle_saves_while_another_erases(self) -> None:
        first, second, keys = self.open("shared"), self.open("shared"), make_keys(32)
        save(second, keys[:16])
        first.refresh()
        first.erase()
        assert save(second, keys[16:24]) == [Outcome.STORED] * 8, "not knowing of it yet"
        second.refresh()
        assert save(second, keys[24:]) == [Outcome.STORED] * 8
        first.refresh()
        for store in (first, second, self.open("shared")):
            assert store.lookup(keys).mask.tolist() == [False] * 16 + [True] * 16
            assert load(store, keys) == [Outcome.MISSING] * 16 + [Outcome.HIT] * 16

    def test_a_key_may_be_saved_again_after_erase(self) -> None:
        store, keys = self.open("mine"), make_keys(16)
        save(store, keys)
        store.erase()
        blocks = blocks_of(make_keys(16, "other bytes"))
        assert finish(store.save(keys, blocks)) == [True] * 16
        buffers = destinations(16)
        assert finish(store.load(keys, buffers)) == [True] * 16
        assert [row.tobytes() for row in buffers] == blocks, "erased bytes came back"

    def test_erase_with_a_load_under_way(self) -> None:
        store, keys = self.open("mine"), make_keys(128)
        save(store, keys)
        buffers = destinations(128)
        transfer = store.load(keys, buffers)
        store.erase()
        transfer.wait(WAIT_S)
        assert set(transfer.outcomes) <= {Outcome.HIT, Outcome.MISSING}
        for key, row, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
            assert outcome is not Outcome.HIT or row.tobytes() == payload(key, BLOCK_BYTES)
