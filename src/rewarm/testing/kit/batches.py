"""Blocks go in and come back: batches, order, partial success, sizes, keys, presence."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rewarm.store.contract import KEY_BYTES_MAX, KEY_BYTES_MIN, Outcome
from rewarm.testing.kit.base import BLOCK_BYTES, StoreKit, blocks_of, destinations, finish, load, save
from rewarm.testing.payload import make_keys, payload

PAGE = 4096
SIZES = (1, 7, 511, 512, 513, PAGE - 1, PAGE, PAGE + 1, 65_536, 100_001, (3 << 20) + 5)


class BatchTests(StoreKit):
    """What goes in comes back."""

    def test_saved_blocks_come_back(self) -> None:
        store, keys = self.open(), make_keys(8)
        assert finish(store.save(keys, blocks_of(keys))) == [True] * 8
        buffers = destinations(8)
        assert finish(store.load(keys, buffers)) == [True] * 8
        assert [row.tobytes() for row in buffers] == blocks_of(keys)

    def test_blocks_come_back_in_any_order(self) -> None:
        store, keys = self.open(), make_keys(16)
        save(store, keys)
        shuffled = [keys[i] for i in np.random.default_rng(1).permutation(16)]
        assert load(store, shuffled) == [Outcome.HIT] * 16

    def test_an_empty_batch_is_over_at_once(self) -> None:
        store = self.open()
        found = store.lookup([])
        assert (found.mask.shape, found.leading) == ((0,), 0)
        for transfer in (store.load([], []), store.save([], [])):
            assert transfer.done()
            assert transfer.wait() == []
            assert transfer.outcomes == []
            assert transfer.released()

    def test_a_key_that_nobody_saved_is_missing(self) -> None:
        store = self.open()
        assert load(store, make_keys(3)) == [Outcome.MISSING] * 3

    def test_partial_success_keeps_key_order(self) -> None:
        store, keys = self.open(), make_keys(40)
        save(store, keys[::3])
        expected = [Outcome.HIT if i % 3 == 0 else Outcome.MISSING for i in range(40)]
        assert load(store, keys) == expected
        transfer = store.load(keys, destinations(40))
        assert finish(transfer) == [outcome is Outcome.HIT for outcome in expected]

    def test_a_key_may_come_twice_in_a_load(self) -> None:
        store, (key, other) = self.open(), make_keys(2)
        save(store, [key, other])
        assert load(store, [key, other, key, key]) == [Outcome.HIT] * 4

    def test_a_key_may_come_twice_in_a_save(self) -> None:
        store, (key, other) = self.open(), make_keys(2)
        assert set(save(store, [key, key, other, key])) <= {Outcome.STORED, Outcome.ALREADY}
        assert load(store, [key, other]) == [Outcome.HIT] * 2

    def test_saving_again_is_true_without_writing(self) -> None:
        store, keys = self.open(), make_keys(4)
        assert save(store, keys[:3]) == [Outcome.STORED] * 3
        written = store.stats().bytes_written
        transfer = store.save(keys[:3], blocks_of(keys[:3]))
        assert finish(transfer) == [True] * 3
        assert transfer.outcomes == [Outcome.ALREADY] * 3
        assert store.stats().bytes_written == written
        assert save(store, keys) == [Outcome.ALREADY] * 3 + [Outcome.STORED]

    def test_the_first_block_of_a_key_stays(self) -> None:
        store, (key, other) = self.open(), make_keys(2)
        save(store, [key])
        transfer = store.save([key], [payload(other, BLOCK_BYTES)])
        finish(transfer)
        assert transfer.outcomes == [Outcome.ALREADY]
        assert load(store, [key]) == [Outcome.HIT]

    @pytest.mark.parametrize("size", SIZES)
    def test_blocks_of_any_size(self, size: int) -> None:
        store, keys = self.open(), make_keys(3, f"size {size}")
        assert save(store, keys, size) == [Outcome.STORED] * 3
        assert load(store, keys, size) == [Outcome.HIT] * 3

    def test_sizes_may_differ_within_a_batch(self) -> None:
        store, keys = self.open(), make_keys(len(SIZES))
        blocks = [payload(key, size) for key, size in zip(keys, SIZES, strict=True)]
        assert finish(store.save(keys, blocks)) == [True] * len(SIZES)
        buffers = [bytearray(size) for size in SIZES]
        assert finish(store.load(keys, buffers)) == [True] * len(SIZES)
        assert buffers == blocks

    @pytest.mark.parametrize("size", [BLOCK_BYTES - 1, BLOCK_BYTES + 1, 1, 2 * BLOCK_BYTES])
    def test_a_buffer_of_another_size_is_a_miss(self, size: int) -> None:
        store, keys = self.open(), make_keys(3)
        save(store, keys)
        buffers = [bytearray(BLOCK_BYTES), bytearray(size), bytearray(BLOCK_BYTES)]
        transfer = store.load(keys, buffers)
        assert finish(transfer) == [True, False, True]
        assert transfer.outcomes == [Outcome.HIT, Outcome.WRONG_SIZE, Outcome.HIT]
        assert [buffers[0], buffers[2]] == blocks_of([keys[0], keys[2]])

    def test_keys_of_every_length(self) -> None:
        store = self.open()
        keys = [make_keys(1, "length", size=size)[0] for size in range(KEY_BYTES_MIN, KEY_BYTES_MAX + 1)]
        assert save(store, keys, PAGE) == [Outcome.STORED] * len(keys)
        assert load(store, keys, PAGE) == [Outcome.HIT] * len(keys)

    def test_keys_are_compared_whole(self) -> None:
        store = self.open()
        stem = make_keys(1)[0]
        keys = [stem[:8], stem[:9], stem[:8] + b"\0", stem, stem + b"\0", stem + bytes(32), stem[:-1] + b"\0", bytes(8)]
        assert len(set(keys)) == len(keys)
        for index, key in enumerate(keys):
            assert load(store, keys[index:], PAGE) == [Outcome.MISSING] * (len(keys) - index)
            assert save(store, [key], PAGE) == [Outcome.STORED]
        assert load(store, keys, PAGE) == [Outcome.HIT] * len(keys)

    def test_a_batch_longer_than_any_queue(self) -> None:
        store, keys = self.open(), make_keys(5000)
        # Counted, because pytest on a CI machine takes minutes to explain how two long lists differ.
        assert Counter(save(store, keys, PAGE)) == {Outcome.STORED: 5000}
        assert Counter(load(store, keys, PAGE)) == {Outcome.HIT: 5000}
        assert store.lookup(keys).leading == 5000

    def test_presence_is_a_mask_and_a_leading_run(self) -> None:
        store, keys = self.open(), make_keys(10)
        save(store, [*keys[:4], keys[5], keys[9]], PAGE)
        found = store.lookup(keys)
        assert found.mask.dtype == np.bool_
        assert found.mask.tolist() == [True] * 4 + [False, True] + [False] * 3 + [True]
        assert found.leading == 4
        assert store.lookup(keys[:4]).leading == 4
        assert store.lookup(keys[4:]).leading == 0
        assert store.lookup([keys[0], keys[0]]).leading == 2

    def test_one_key_can_be_asked_for(self) -> None:
        store, (key, other) = self.open(), make_keys(2)
        save(store, [key], PAGE)
        assert key in store
        assert other not in store

    def test_a_batch_is_any_sequence(self) -> None:
        store, keys = self.open(), tuple(make_keys(3))
        assert finish(store.save(keys, tuple(blocks_of(keys)))) == [True] * 3
        assert store.lookup(keys).leading == 3
        assert finish(store.load(keys, tuple(bytearray(BLOCK_BYTES) for _ in keys))) == [True] * 3
