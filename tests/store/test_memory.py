"""The reference store passes the kit, and keeps the few promises that are its own."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

from rewarm.errors import ConfigError
from rewarm.store.contract import Store
from rewarm.store.memory import CAPACITY_BYTES_DEFAULT, MemoryStore
from rewarm.testing import StoreMachine, StoreTests, make_keys, payload


class TestMemoryStore(StoreTests):
    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        return MemoryStore(namespace, name=str(self.pool), capacity_bytes=capacity_bytes, queue_bytes=queue_bytes)


class MemoryMachine(StoreMachine):
    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        return MemoryStore(namespace, name=f"{pool} under test", capacity_bytes=capacity_bytes)


class TestMemoryMachine(MemoryMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=20, stateful_step_count=30)


def _save(store: MemoryStore, key: bytes) -> None:
    assert store.save([key], [payload(key, 100)]).wait() == [True]


def test_without_a_name_a_pool_is_private() -> None:
    key = make_keys(1)[0]
    first, second = MemoryStore(), MemoryStore()
    _save(first, key)
    assert key in first
    assert key not in second
    assert first.stats().capacity_bytes == CAPACITY_BYTES_DEFAULT


def test_a_name_means_one_pool_in_the_process() -> None:
    key = make_keys(1)[0]
    first = MemoryStore(name="test_a_name", capacity_bytes=4096)
    _save(first, key)
    second = MemoryStore(name="test_a_name")
    assert key in second
    assert second.stats().capacity_bytes == 4096


def test_a_named_pool_goes_with_its_last_handle() -> None:
    key = make_keys(1)[0]
    store = MemoryStore(name="test_goes", capacity_bytes=4096)
    _save(store, key)
    store.close()
    del store
    gc.collect()
    assert key not in MemoryStore(name="test_goes", capacity_bytes=8192)


@pytest.mark.parametrize("capacity_bytes", [0, -1])
def test_a_capacity_without_room_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(ConfigError, match="capacity"):
        MemoryStore(capacity_bytes=capacity_bytes)


def test_the_oldest_block_makes_room() -> None:
    keys = make_keys(4)
    store = MemoryStore(capacity_bytes=300)
    for key in keys:
        _save(store, key)
    assert store.lookup(keys).mask.tolist() == [False, True, True, True]
    assert store.stats().evicted_bytes == 100
