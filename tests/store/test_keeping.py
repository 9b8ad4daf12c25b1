"""What was read stays when its segment has to go: first in, first out with reinsertion."""

from __future__ import annotations

from pathlib import Path

from tests.store.test_eviction import CAPACITY, HIT, SEGMENT, STORED, load, open_pool, save, used

from rewarm.testing import make_keys


def test_what_was_read_is_kept_for_another_turn(tmp_path: Path) -> None:
    keys = make_keys(64)
    with open_pool(tmp_path) as store:
        assert save(store, keys) == [STORED] * 64
        for _ in range(2):
            assert load(store, [keys[0], keys[5], keys[6]]) == [HIT] * 3
        assert load(store, [keys[6]]) == [HIT]
        assert save(store, make_keys(190, "more")) == [STORED] * 190
        store.flush()
        kept = store.lookup(keys).mask
        assert kept[0], "it was read"
        assert not kept[1:4].any()
        assert kept[6], "it was read most in its segment"
        assert not kept[5], "a quarter of a segment is kept, no more"
        assert load(store, [keys[0], keys[6]]) == [HIT] * 2
        assert save(store, make_keys(230, "still more")) == [STORED] * 230
        assert used(tmp_path) <= CAPACITY


def test_damaged_or_lost_blocks_are_not_kept(tmp_path: Path) -> None:
    keys = make_keys(64)
    with open_pool(tmp_path) as store:
        assert save(store, keys) == [STORED] * 64
        assert load(store, keys) == [HIT] * 64
        first, *_, last = sorted((tmp_path / "writers").glob("*/*.seg"))
        with open(first, "r+b") as file:
            file.write(bytes(SEGMENT))
        assert set(save(store, make_keys(190, "more"))) == {STORED}
        store.flush()
        assert not store.lookup(keys[:4]).mask.any()
        assert last.exists()
