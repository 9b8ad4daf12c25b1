"""A file store whose devices misbehave when told to, and places on a medium that are bad for good."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from rewarm.store.contract import Outcome, Transfer
from rewarm.store.devices.base import COMPLETION, READ, Completions, Device, Operations
from rewarm.store.file import FileStore
from rewarm.store.opening import open_store
from rewarm.testing import FaultyDevice, payload

CAPACITY = 64 << 20
WAIT_S = 60.0


class BadPlaces:
    """A device on which reads of some file offsets fail for good: a medium with bad sectors."""

    def __init__(self, inner: Device) -> None:
        self.name, self.depth = inner.name, inner.depth
        self.bad: list[range] = []
        self.error = errno.EIO
        self._inner = inner
        self._failed: list[tuple[int, int]] = []

    def submit(self, operations: Operations) -> None:
        """Fail what touches a bad place, pass on the rest."""
        start = operations["offset"].astype(np.int64)
        end = start + operations["length"].astype(np.int64)
        hit = np.zeros(len(operations), np.bool_)
        for bad in self.bad:
            hit |= (start < bad.stop) & (end > bad.start) & (operations["opcode"] == READ)
        self._failed += [(tag, -self.error) for tag in operations["tag"][hit].tolist()]
        if not hit.all():
            self._inner.submit(operations[~hit])

    def reap(self, minimum: int = 1, timeout_s: float | None = None) -> Completions:
        """See `Device.reap`."""
        failed, self._failed = self._failed, []
        found = self._inner.reap(0 if failed else minimum, timeout_s)
        return np.concatenate([np.array(failed, COMPLETION), found])

    def wake(self) -> None:
        """See `Device.wake`."""
        self._inner.wake()

    def in_flight(self) -> int:
        """See `Device.in_flight`."""
        return self._inner.in_flight() + len(self._failed)

    def close(self) -> None:
        """See `Device.close`."""
        self._inner.close()


class FaultyStore:
    """A store on `root` with a faulty device for reads (under it bad places) and one for writes; closed at the end."""

    def __init__(self, root: Path, options: str = "", *, capacity: int = CAPACITY, namespace: object = "faulty"):
        def wrap_reads(device: Device) -> Device:
            self.places = BadPlaces(device)
            self.reads = FaultyDevice(self.places, seed=1)
            return self.reads

        def wrap_writes(device: Device) -> Device:
            self.writes = FaultyDevice(device, seed=2)
            return self.writes

        store = open_store(
            f"file://{root}?capacity={capacity}{options}",
            namespace=namespace,
            device_wrapper=wrap_reads,
            write_device_wrapper=wrap_writes,
        )
        assert isinstance(store, FileStore)
        self.store = store

    def hurry(self, seconds: float) -> None:
        """Shorten the I/O deadline of what comes: opening a pool may take longer than that on a busy machine."""
        store = self.store
        store.io_deadline_s = store._reads.io_deadline_s = store._writes.io_deadline_s = seconds
        store._tailer.doubts._deadline_s = seconds

    def heal(self) -> None:
        """Forget every fault that has not struck, and end those that hang."""
        for device in (self.reads, self.writes):
            device.heal()
            device.release_stalled()

    def __enter__(self) -> FaultyStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.heal()
        self.store.close()


def arena(count: int, size: int) -> np.ndarray:
    """Blocks of memory that start on pages and follow each other, shape (count, size)."""
    whole = np.zeros(count * size + 4096, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + count * size].reshape(count, size)


def save(store: FileStore, keys: Sequence[bytes], size: int) -> list[Outcome | None]:
    """Save the payloads of `keys` in one batch; returns the outcomes."""
    transfer = store.save(keys, [payload(key, size) for key in keys])
    transfer.wait(WAIT_S)
    assert transfer.wait_released(WAIT_S)
    return transfer.outcomes


def load(store: FileStore, keys: Sequence[bytes], size: int, *, aligned: bool = True) -> list[Outcome | None]:
    """Load `keys`, check the bytes of every hit; returns the outcomes."""
    buffers = list(arena(len(keys), size)) if aligned else [bytearray(size) for _ in keys]
    transfer = store.load(keys, buffers)
    transfer.wait(WAIT_S)
    assert transfer.wait_released(WAIT_S)
    return checked(transfer, keys, buffers)


def checked(transfer: Transfer, keys: Sequence[bytes], buffers: Sequence[object]) -> list[Outcome | None]:
    """The outcomes of a load; every hit has the right bytes."""
    for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
        content = bytes(buffer)  # type: ignore[call-overload]
        assert outcome is not Outcome.HIT or content == payload(key, len(content)), "wrong bytes"
    return transfer.outcomes
