"""A raw pool on a fixed file passes the store kit."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.header import LOG_OFFSET, plan_header
from rewarm.testing import StoreTests


def make_file(path: Path, capacity_bytes: int, host: str = "") -> Path:
    """A formatted fixed file whose slots hold `capacity_bytes`."""
    size = LOG_OFFSET + capacity_bytes + (capacity_bytes >> 3)
    while plan_header(size, bytes(16), "", slot_bytes=capacity_bytes // 32).capacity_bytes > capacity_bytes:
        size -= capacity_bytes // 32
    with path.open("wb") as file:
        file.truncate(size)
    format_device(str(path), slot_bytes=capacity_bytes // 32, host=host)
    return path


@pytest.mark.crash
class TestRawStore(StoreTests):
    persistent = True

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        path = self.pool / "device"
        if not path.exists():
            make_file(path, capacity_bytes)
        url = f"block://{path}?save_queue={queue_bytes}&poll=20ms&lease=30s"
        return open_store(url, namespace=namespace, capacity=capacity_bytes)
