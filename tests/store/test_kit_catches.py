"""The kit and the state machine can fail: each of these stores has one bug, and the named test finds it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rewarm.store import forks
from rewarm.store.contract import EMPTY_NAMESPACE, Outcome, Presence, Store
from rewarm.store.memory import MemoryPin, MemoryStore
from rewarm.testing import StoreMachine, StoreTests

Place = tuple[bytes, bytes]
View = npt.NDArray[np.uint8]


class OneNamespace(MemoryStore):
    def __init__(self, namespace: object = None, **options: Any) -> None:
        super().__init__(namespace, **options)
        self._namespace = EMPTY_NAMESPACE


class FlipsBits(MemoryStore):
    def _load_one(self, place: Place, view: View) -> Outcome:
        outcome = super()._load_one(place, view)
        if outcome is Outcome.HIT:
            view[-1] ^= 1
        return outcome


class TrustsAnySize(MemoryStore):
    def _load_one(self, place: Place, view: View) -> Outcome:
        block = self._pool.blocks.get(place)
        if block is None:
            return Outcome.MISSING
        size = min(len(block), len(view))
        view[:size] = np.frombuffer(block, np.uint8)[:size]
        return Outcome.HIT


class CutsKeys(MemoryStore):
    def _places(self, keys: Sequence[bytes]) -> list[Place]:
        return [(namespace, key[:8]) for namespace, key in super()._places(keys)]


class PromisesEverything(MemoryStore):
    def lookup(self, keys: Sequence[bytes]) -> Presence:
        return Presence.of(np.ones(len(keys), np.bool_))


class ForgetsToErase(MemoryStore):
    def erase(self) -> int:
        return 1


class ErasesEverybody(MemoryStore):
    def erase(self) -> int:
        return sum(self._pool.drop(place) for place in list(self._pool.blocks))


class EvictsTheNewest(MemoryStore):
    def _evict(self, to_bytes: int) -> int:
        self._pool.blocks = dict(reversed(self._pool.blocks.items()))
        freed = super()._evict(to_bytes)
        self._pool.blocks = dict(reversed(self._pool.blocks.items()))
        return freed


class IgnoresPins(MemoryStore):
    def pin(self, keys: Sequence[bytes]) -> MemoryPin:
        return MemoryPin(self.lookup(keys).mask, lambda: None)


class WritesTwice(MemoryStore):
    def _save_one(self, place: Place, view: View, queued_bytes: int) -> Outcome:
        if place in self._pool.blocks:
            self._pool.drop(place)
        return super()._save_one(place, view, queued_bytes)


class LosesSaves(MemoryStore):
    def _save_one(self, place: Place, view: View, queued_bytes: int) -> Outcome:
        outcome = super()._save_one(place, view, queued_bytes)
        if outcome is Outcome.STORED and place[1][-1] % 8 == 0:
            self._pool.drop(place)
        return outcome


class CountsTwice(MemoryStore):
    def _load_one(self, place: Place, view: View) -> Outcome:
        outcome = super()._load_one(place, view)
        if outcome is Outcome.HIT:
            self._counters.add(bytes_read=len(view))
        return outcome


class NeverCloses(MemoryStore):
    def close(self) -> None:
        pass


class WorksAfterFork(MemoryStore):
    def _check_usable(self) -> None:
        self._forks = forks.count
        super()._check_usable()


class HasNoBudget(MemoryStore):
    def __init__(self, namespace: object = None, **options: Any) -> None:
        super().__init__(namespace, **(options | {"queue_bytes": 1 << 40}))


class LeaksDescriptors(MemoryStore):
    def __init__(self, namespace: object = None, **options: Any) -> None:
        super().__init__(namespace, **options)
        os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)


def _kit_of(store: type[MemoryStore]) -> type[StoreTests]:
    class Kit(StoreTests):
        def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
            return store(namespace, name=str(self.pool), capacity_bytes=capacity_bytes, queue_bytes=queue_bytes)

    return Kit


def _machine_of(store: type[MemoryStore]) -> type[StoreMachine]:
    class Machine(StoreMachine):
        def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
            return store(namespace, name=f"{pool} under test", capacity_bytes=capacity_bytes)

    return Machine


CAUGHT_BY_KIT = [
    (OneNamespace, "test_namespaces_do_not_see_each_other"),
    (FlipsBits, "test_saved_blocks_come_back"),
    (CutsKeys, "test_keys_are_compared_whole"),
    (PromisesEverything, "test_presence_is_a_mask_and_a_leading_run"),
    (ForgetsToErase, "test_erase_removes_one_namespace"),
    (ErasesEverybody, "test_erase_removes_one_namespace"),
    (EvictsTheNewest, "test_evict_drops_the_oldest"),
    (EvictsTheNewest, "test_a_pool_stays_within_its_capacity"),
    (IgnoresPins, "test_pinned_blocks_are_not_evicted"),
    (WritesTwice, "test_saving_again_is_true_without_writing"),
    (WritesTwice, "test_the_first_block_of_a_key_stays"),
    (LosesSaves, "test_a_batch_longer_than_any_queue"),
    (CountsTwice, "test_loads_are_counted"),
    (NeverCloses, "test_a_closed_handle_raises"),
    (WorksAfterFork, "test_a_handle_used_after_fork_raises"),
    (HasNoBudget, "test_saves_over_the_budget_are_refused_not_waited_for"),
    (LeaksDescriptors, "test_descriptors_are_close_on_exec"),
    (LeaksDescriptors, "test_close_gives_all_descriptors_back"),
]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize(("store", "test"), CAUGHT_BY_KIT)
def test_the_kit_catches(store: type[MemoryStore], test: str, tmp_path: Path) -> None:
    kit = _kit_of(store)()
    kit.pool = tmp_path / "pool"
    with contextlib.ExitStack() as kit._handles, pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(kit, test)()


CAUGHT_BY_MACHINE = [
    OneNamespace,
    FlipsBits,
    TrustsAnySize,
    CutsKeys,
    PromisesEverything,
    ForgetsToErase,
    ErasesEverybody,
    IgnoresPins,
    WritesTwice,
    LosesSaves,
]


@pytest.mark.parametrize("store", CAUGHT_BY_MACHINE)
def test_the_machine_catches(store: type[MemoryStore]) -> None:
    enough = settings(
        max_examples=300, stateful_step_count=20, phases=[Phase.generate], database=None, derandomize=True
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(_machine_of(store), settings=enough)


def test_the_right_store_is_not_caught(tmp_path: Path) -> None:
    for test in sorted({test for _, test in CAUGHT_BY_KIT}):
        kit = _kit_of(MemoryStore)()
        kit.pool = tmp_path / test
        with contextlib.ExitStack() as kit._handles:
            getattr(kit, test)()
