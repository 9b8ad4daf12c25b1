"""Pins of a raw pool: slots that hold pinned blocks stay, whatever is evicted, until the last pin is released."""

from __future__ import annotations

from pathlib import Path

from tests.store.raw.devices import make_file, open_as

from rewarm.store.contract import Outcome
from rewarm.testing import make_keys
from rewarm.testing.kit.base import load, save

CAPACITY = 8 << 20
SIZE = 60_000
HIT, MISSING, STORED = Outcome.HIT, Outcome.MISSING, Outcome.STORED


def test_pinned_slots_stay_until_the_last_pin_goes(tmp_path: Path) -> None:
    keys, absent = make_keys(12), make_keys(1, "absent")
    with open_as(make_file(tmp_path / "device", CAPACITY, "a"), "a") as store:
        assert save(store, keys, SIZE) == [STORED] * 12
        with store.pin([keys[0], *absent]) as pin:
            assert pin.mask.tolist() == [True, False]
            second = store.pin(keys[:1])
            store.evict(0)
            assert load(store, keys[:1], SIZE) == [HIT]
        store.evict(0)
        assert load(store, keys[:1], SIZE) == [HIT], "there is another pin"
        second.release()
        second.release()
        assert save(store, make_keys(12, "more"), SIZE) == [STORED] * 12
        store.evict(0)
        assert load(store, keys[:1], SIZE) == [MISSING]


def test_who_only_reads_a_raw_pool_may_ask_for_a_pin(tmp_path: Path) -> None:
    keys = make_keys(2)
    path = make_file(tmp_path / "device", CAPACITY, "a")
    with open_as(path, "a") as owner, open_as(path, "b") as reader:
        assert save(owner, keys, SIZE) == [STORED] * 2
        reader.refresh()
        with reader.pin(keys) as pin:
            assert pin.mask.all()
