"""A pool of drives passes the kit and the state machine, over directories and over memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant
from tests.lengths import repeated

from rewarm.store.contract import Store
from rewarm.testing import StoreMachine, StoreTests
from rewarm.testing.machine import CAPACITY_BYTES
from rewarm.tiers.opening import open_tier


def url_of(pool: Path, capacity_bytes: int, options: str = "") -> str:
    """A pool over two directories below `pool`, which are made if they are not there."""
    for name in ("a", "b"):
        (pool / name).mkdir(exist_ok=True)
    return f"pool:?drive={pool}/a&drive={pool}/b&capacity={capacity_bytes}{options}"


class TestPool(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        return open_tier(url_of(self.pool, capacity_bytes, f"&save_queue={queue_bytes}"), namespace=namespace)


@pytest.mark.crash  # The same promises in arrival order; the quick suite holds the default order to them.
class TestPoolInArrivalOrder(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        options = f"&save_queue={queue_bytes}&order=arrival"
        return open_tier(url_of(self.pool, capacity_bytes, options), namespace=namespace)


class PoolMachine(StoreMachine):
    """Over directories, each with the least capacity that a directory can have: that of the machine."""

    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        return open_tier(url_of(pool, 2 * capacity_bytes), namespace=namespace)

    @invariant()
    def space_is_bounded(self) -> None:
        """The drives stay within their capacity."""
        for handle in self.handles:
            assert handle.store.stats().used_bytes <= 2 * CAPACITY_BYTES


class MemoryPoolMachine(StoreMachine):
    persistent = False

    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        drives = "&".join(f"drive=memory:{pool}/{name}" for name in ("a", "b", "c"))
        return open_tier(f"pool:?{drives}&capacity={capacity_bytes}", namespace=namespace)


class TestMemoryPoolMachine(MemoryPoolMachine.TestCase):
    settings = settings(max_examples=15, stateful_step_count=30)


@pytest.mark.crash
class TestPoolMachineAtLength(PoolMachine.TestCase):
    settings = settings(max_examples=repeated(20, 60), stateful_step_count=40)
