"""A raw pool on a fixed file passes the store kit."""

from __future__ import annotations

import pytest
from tests.store.raw.devices import make_file

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.testing import StoreTests


@pytest.mark.crash
class TestRawStore(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        path = self.pool / "device"
        if not path.exists():
            make_file(path, capacity_bytes)
        url = f"block://{path}?save_queue={queue_bytes}&poll=20ms&lease=30s"
        return open_store(url, namespace=namespace, capacity=capacity_bytes)
