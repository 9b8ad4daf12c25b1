"""What all parts of the kit share: a fresh pool per test, handles that are closed at its end, blocks and keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rewarm.store.contract import SAVE_QUEUE_BYTES, Outcome, Store, Transfer
from rewarm.testing.payload import payload

BLOCK_BYTES = 64 << 10
CAPACITY_BYTES = 256 << 20
"""Far above what one test saves, so that nothing is evicted unless a test asks for a small pool."""

SMALL_CAPACITY_BYTES = 16 << 20
WAIT_S = 60.0
"""A batch of a test takes milliseconds; after this a store is taken to hang."""

UNTOUCHED = 0xA5
"""Destinations are filled with this, so that memory nobody wrote is told from memory that holds zeros."""


class StoreKit:
    """Opens handles on `self.pool`, an empty directory made for each test; a store may use its path as a name only."""

    persistent = False
    """True when blocks outlive all handles of a pool."""

    pool: Path

    def open_store(self, namespace: object, *, capacity_bytes: int, queue_bytes: int) -> Store:
        """Open one more handle on `self.pool`. `queue_bytes` bounds the saves that wait in memory."""
        raise NotImplementedError("a subclass of StoreTests opens its store here")

    @pytest.fixture(autouse=True)
    def _fresh_pool(self, tmp_path: Path) -> Iterator[None]:
        self.pool = tmp_path / "pool"
        self.pool.mkdir()
        with contextlib.ExitStack() as self._handles:
            yield

    def open(
        self, namespace: object = None, *, capacity_bytes: int = CAPACITY_BYTES, queue_bytes: int = SAVE_QUEUE_BYTES
    ) -> Store:
        """A handle that is closed at the end of the test."""
        store = self.open_store(namespace, capacity_bytes=capacity_bytes, queue_bytes=queue_bytes)
        self._handles.callback(store.close)
        return store


def blocks_of(keys: Sequence[bytes], size: int = BLOCK_BYTES) -> list[bytes]:
    """The blocks that belong to `keys`."""
    return [payload(key, size) for key in keys]


def destinations(count: int, size: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """Fresh memory to load into, shape (count, size)."""
    return np.full((count, size), UNTOUCHED, dtype=np.uint8)


def finish(transfer: Transfer) -> list[bool]:
    """Wait for verdicts and for the release; fails on a store that hangs."""
    good = transfer.wait(WAIT_S)
    assert transfer.done()
    assert Outcome.TIMED_OUT not in transfer.outcomes, f"no verdict within {WAIT_S} s"
    assert transfer.wait_released(WAIT_S), f"not released within {WAIT_S} s"
    return good


def save(store: Store, keys: Sequence[bytes], size: int = BLOCK_BYTES) -> list[Outcome | None]:
    """Save the payloads of `keys`, in one batch."""
    transfer = store.save(keys, blocks_of(keys, size))
    finish(transfer)
    return transfer.outcomes


def load(store: Store, keys: Sequence[bytes], size: int = BLOCK_BYTES) -> list[Outcome | None]:
    """Load `keys` in one batch; every hit must hold its payload."""
    buffers = destinations(len(keys), size)
    transfer = store.load(keys, buffers)
    finish(transfer)
    assert_hits_are_right(keys, buffers, transfer.outcomes)
    return transfer.outcomes


def assert_hits_are_right(
    keys: Sequence[bytes], buffers: Sequence[object] | npt.NDArray[np.uint8], outcomes: Sequence[Outcome | None]
) -> None:
    """Every hit holds the payload of its key."""
    assert len(outcomes) == len(keys)
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        if outcome is Outcome.HIT:
            held = memoryview(buffer).cast("B")
            assert held == payload(key, len(held)), f"wrong bytes for {key.hex()}"
