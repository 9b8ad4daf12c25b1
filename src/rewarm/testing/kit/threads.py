"""Every method may be called from any thread; several handles of one pool work side by side."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rewarm.errors import MisuseError
from rewarm.store.contract import Outcome, Store
from rewarm.testing.kit.base import SMALL_CAPACITY_BYTES, WAIT_S, StoreKit, load, save
from rewarm.testing.payload import make_keys

THREADS = 8
ROUNDS = 8
SIZE = 10_000


def _together(work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(THREADS - 1)` at once; the first failure is raised."""
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(work, index) for index in range(THREADS)]:
            future.result(WAIT_S)


class ThreadTests(StoreKit):
    """Many threads, many handles."""

    def test_threads_share_a_handle(self) -> None:
        store = self.open()

        def work(index: int) -> None:
            for turn in range(ROUNDS):
                keys = make_keys(10, f"{index} {turn}")
                assert save(store, keys, SIZE) == [Outcome.STORED] * 10
                assert store.lookup(keys).leading == 10
                assert load(store, keys, SIZE) == [Outcome.HIT] * 10

        _together(work)
        stats = store.stats()
        assert stats.stored == stats.hits == stats.blocks == THREADS * ROUNDS * 10
        assert store.check().clean

    def test_threads_save_the_same_keys(self) -> None:
        store, keys = self.open(), make_keys(40)

        def work(index: int) -> None:
            assert set(save(store, keys, SIZE)) <= {Outcome.STORED, Outcome.ALREADY}
            assert load(store, keys, SIZE) == [Outcome.HIT] * 40

        _together(work)
        assert store.stats().stored + store.stats().already == THREADS * 40
        assert store.stats().blocks == 40

    def test_handles_of_one_pool_work_side_by_side(self) -> None:
        stores = [self.open("shared") for _ in range(THREADS)]
        keys = [make_keys(ROUNDS, f"{index}") for index in range(THREADS)]

        def work(index: int) -> None:
            for key in keys[index]:
                assert save(stores[index], [key], SIZE) == [Outcome.STORED]
                stores[index].refresh()
                everything = [key for part in keys for key in part]
                assert set(load(stores[index], everything, SIZE)) <= {Outcome.HIT, Outcome.MISSING}

        _together(work)
        everything = [key for part in keys for key in part]
        for store in stores:
            store.refresh()
            assert load(store, everything, SIZE) == [Outcome.HIT] * len(everything)

    def test_loads_and_eviction_meet(self) -> None:
        store = self.open(capacity_bytes=SMALL_CAPACITY_BYTES)

        def work(index: int) -> None:
            for turn in range(ROUNDS):
                keys = make_keys(20, f"{index} {turn}")
                outcomes = save(store, keys, SIZE)
                assert set(outcomes) <= {Outcome.STORED, Outcome.REFUSED_FULL}
                assert set(load(store, keys, SIZE)) <= {Outcome.HIT, Outcome.MISSING}
                if turn % 4 == index % 4:
                    store.evict(SMALL_CAPACITY_BYTES // 2)

        _together(work)
        assert store.stats().used_bytes <= SMALL_CAPACITY_BYTES
        assert store.check().clean

    def test_close_while_others_work(self) -> None:
        """Whatever the moment, a verb gives verdicts or raises `MisuseError`; nothing hangs."""
        store = self.open()

        def work(index: int) -> None:
            if index == 0:
                _some(store, "closer", rounds=2)
                store.close()
                return
            try:
                _some(store, f"{index}", rounds=ROUNDS)
            except MisuseError:
                return

        _together(work)


def _some(store: Store, tag: str, rounds: int) -> None:
    for turn in range(rounds):
        keys = make_keys(10, f"{tag} {turn}")
        save(store, keys, SIZE)
        load(store, keys, SIZE)
