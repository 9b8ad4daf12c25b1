"""The file store passes the kit and the state machine, by the device of its choice, and at length by plain threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from tests.lengths import repeated

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.testing import StoreMachine, StoreTests


class TestFileStore(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        return open_store(f"file://{self.pool}?capacity={capacity_bytes}&save_queue={queue_bytes}", namespace=namespace)


@pytest.mark.crash  # The same promises by the other device: the quick suite holds the default one to them.
class TestFileStoreOnThreads(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        url = f"file://{self.pool}?capacity={capacity_bytes}&save_queue={queue_bytes}&device=threads"
        return open_store(url, namespace=namespace)


class FileMachine(StoreMachine):
    """Only `refresh` reads what others wrote, so that a failure can be repeated and shrunk."""

    poll = "1h"

    def open_store(self, pool: Path, namespace: str, capacity_bytes: int) -> Store:
        return open_store(f"file://{pool}?capacity={capacity_bytes}&poll={self.poll}", namespace=namespace)


class PollingFileMachine(FileMachine):
    """The poller gets in between whenever it can."""

    poll = "5ms"


class TestFileMachine(FileMachine.TestCase):
    settings = settings(max_examples=6, stateful_step_count=25)


@pytest.mark.crash
class TestFileMachineAtLength(FileMachine.TestCase):
    settings = settings(max_examples=repeated(20, 60), stateful_step_count=40)


@pytest.mark.crash
class TestPollingFileMachineAtLength(PollingFileMachine.TestCase):
    settings = settings(max_examples=repeated(20, 60), stateful_step_count=40)
