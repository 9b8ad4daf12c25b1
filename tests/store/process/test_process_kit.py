"""The store passes the kit and the state machine with an I/O process, too, when all memory of the tests is shared."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from tests.store.process.helpers import ChildThread, in_a_thread, open_with_process

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.store.process.arena import shared_arena
from rewarm.testing import StoreMachine, StoreTests, machine
from rewarm.testing.kit import base, batches, buffers, counters, lifecycle, space, transfers

pytestmark = pytest.mark.crash

ARENA_BYTES = 64 << 20


class Memory:
    """Shared memory that is given out from the front, again and again."""

    def __init__(self) -> None:
        self.all = np.frombuffer(shared_arena(ARENA_BYTES), np.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Zeroed memory that nobody else has had for long."""
        with self._lock:
            if self._used + size > ARENA_BYTES:
                self._used = 0
            taken = self.all[self._used : self._used + size]
            self._used += -(-size // 4096) * 4096
        taken[:] = 0
        return taken

    def rows(self, count: int, size: int = base.BLOCK_BYTES) -> npt.NDArray[np.uint8]:
        """What the kit calls destinations."""
        rows = self.take(count * size).reshape(count, size)
        rows[:] = base.UNTOUCHED
        return rows


MEMORY = Memory()


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> list[ChildThread]:
    made = in_a_thread(monkeypatch)
    for module in (base, batches, buffers, counters, lifecycle, space, transfers):
        monkeypatch.setattr(module, "destinations", MEMORY.rows)
    monkeypatch.setattr(machine, "bytearray", lambda size: memoryview(MEMORY.take(size)), raising=False)
    return made


class TestFileStoreByProcess(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        store = open_store(
            f"file://{self.pool}?capacity={capacity_bytes}&save_queue={queue_bytes}&io=process", namespace=namespace
        )
        store.register(MEMORY.all)
        return store


class ProcessMachine(StoreMachine):
    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        url = f"file://{pool}?capacity={capacity_bytes}&poll=1h&io=process"
        store = open_store(url, namespace=namespace)
        store.register(MEMORY.all)
        return store


class TestProcessMachine(ProcessMachine.TestCase):
    settings = settings(max_examples=6, stateful_step_count=25)


def test_the_memory_of_these_tests_goes_through_the_process(tmp_path: Path) -> None:
    with open_with_process(tmp_path) as store:
        store.register(MEMORY.all)
        keys: list[Any] = [bytes([number]) * 32 for number in range(8)]
        assert all(store.save(keys, [key * 100 for key in keys]).wait())
        assert all(store.load(keys, MEMORY.rows(8, 3200)).wait())
        assert store._restorer._by_thread == 0
