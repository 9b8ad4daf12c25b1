"""A raw pool passes the store kit on a fixed file; on a loop device those parts of it that move blocks or make room."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.raw.devices import loop_over, make_file

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.testing import StoreTests
from rewarm.testing.kit.base import StoreKit
from rewarm.testing.kit.lifecycle import LifecycleTests
from rewarm.testing.kit.space import SpaceTests
from rewarm.testing.kit.transfers import TransferTests

pytestmark = pytest.mark.crash


class OnAFile(StoreKit):
    """Opens a raw pool on a fixed file."""

    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        device = self.device(capacity_bytes)
        url = f"block://{device}?save_queue={queue_bytes}&poll=20ms&lease=30s"
        return open_store(url, namespace=namespace, capacity=capacity_bytes)

    def device(self, capacity_bytes: int) -> Path:
        """What the pool lies on; made when it is first asked for."""
        path = self.pool / "device"
        return path if path.exists() else make_file(path, capacity_bytes)


class OnALoopDevice(OnAFile):
    """The same on a loop device, which is detached after the last handle is closed."""

    def device(self, capacity_bytes: int) -> Path:
        link = self.pool / "loop"
        if not link.is_symlink():
            link.symlink_to(self._handles.enter_context(loop_over(super().device(capacity_bytes))))
        return link


class TestRawStore(OnAFile, StoreTests):
    """The whole kit."""


class TestRawStoreOnALoopDevice(OnALoopDevice, TransferTests, LifecycleTests, SpaceTests):
    """Arguments, counters and threads are the same code on both."""
