"""A stack of DRAM, drives and a shared store passes the kit and the state machine of stores.

The DRAM is far smaller than what the tests save, so that blocks are promoted and dropped all the time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from tests.lengths import repeated

from rewarm.store.contract import Store
from rewarm.testing import StoreMachine, StoreTests
from rewarm.tiers.opening import open_tier
from rewarm.tiers.stack import StackStore


class Siblings:
    """Handles of one stack. Erasing does not know of copies that other handles have under way: they come first."""

    def __init__(self) -> None:
        self._open: list[StackStore] = []

    def add(self, store: Store) -> Store:
        assert isinstance(store, StackStore)
        self._open.append(store)
        erase = store.erase

        def erase_after_copies() -> int:
            for other in self._open:
                if not other._closed and other is not store:
                    other._drain()
            return erase()

        store.erase = erase_after_copies  # type: ignore[method-assign]
        return store


@pytest.mark.crash  # The quick suite holds the pool below to the same promises, and the stack to its own.
class TestStack(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        if not hasattr(self, "siblings"):
            self.siblings = Siblings()
        for name in ("a", "b", "shared"):
            (self.pool / name).mkdir(exist_ok=True)
        drives = f"drive={self.pool}/a&drive={self.pool}/b&capacity={capacity_bytes}"
        # Smaller than the drives: what only it holds may go with a copy that comes while a test looks.
        shared = f"shared={self.pool}/shared%3Fcapacity={capacity_bytes // 2}"
        url = f"pool:?{drives}&{shared}&dram=2MiB&save_queue={queue_bytes}"
        return self.siblings.add(open_tier(url, namespace=namespace))


class MemoryStackMachine(StoreMachine):
    persistent = False

    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        if not hasattr(self, "siblings"):
            self.siblings = Siblings()
        drives = f"drive=memory:{pool}/a&drive=memory:{pool}/b&capacity={capacity_bytes}"
        shared = f"shared=memory:{pool}/shared%3Fcapacity={2 * capacity_bytes}"
        return self.siblings.add(open_tier(f"pool:?{drives}&{shared}&dram=256KiB", namespace=namespace))


class TestMemoryStackMachine(MemoryStackMachine.TestCase):
    settings = settings(max_examples=8, stateful_step_count=30)


@pytest.mark.crash
class TestMemoryStackMachineAtLength(MemoryStackMachine.TestCase):
    settings = settings(max_examples=repeated(30, 100), stateful_step_count=50)
