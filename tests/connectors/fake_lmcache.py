"""A stand-in for what the plug-in uses of LMCache, by its documented signatures; tests/lmcache has the real one."""

from __future__ import annotations

import os
import types
from types import SimpleNamespace
from typing import Any


class Bitmap:
    """One bit per key."""

    def __init__(self, count: int) -> None:
        self.bits = [False] * count

    def set(self, i: int) -> None:
        self.bits[i] = True


class StoreResult(int):
    """Bytes moved, or -1."""

    def __new__(cls, success: bool, moved: int) -> StoreResult:
        return super().__new__(cls, moved if success else -1)


class Event:
    """An eventfd."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def notify(self) -> None:
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close  # no other test is to find it open


class L2AdapterInterface:
    """Accounting, as the real base class does it; `broken` makes its listeners fail."""

    broken = False

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self._shared = False
        self.stored: dict[Any, int] = {}
        self.accessed: list[Any] = []

    def _notify_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        if self.broken:
            raise RuntimeError("a listener")
        self.stored.update(zip(keys, sizes, strict=True))

    def _notify_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def _notify_keys_deleted(self, keys: list[Any], sizes: list[int]) -> None:
        for key, size in zip(keys, sizes, strict=True):
            assert self.stored.pop(key) == size

    def get_usage(self) -> Any:
        return SimpleNamespace(bytes_by_cache_salt={"": sum(self.stored.values())})


def modules() -> dict[str, types.ModuleType]:
    """Modules by name, to be put into `sys.modules`."""
    names = [
        "lmcache",
        "lmcache.lmcache_native",
        "lmcache.v1",
        "lmcache.v1.platform",
        "lmcache.v1.distributed",
        "lmcache.v1.distributed.api",
        "lmcache.v1.distributed.internal_api",
        "lmcache.v1.distributed.l2_adapters",
        "lmcache.v1.distributed.l2_adapters.base",
    ]
    made: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    made["lmcache.lmcache_native"].Bitmap = Bitmap
    made["lmcache.v1.platform"].create_event_notifier = Event
    made["lmcache.v1.distributed.internal_api"].L2StoreResult = StoreResult
    made["lmcache.v1.distributed.l2_adapters.base"].L2AdapterInterface = L2AdapterInterface
    made["lmcache.v1.distributed.l2_adapters.base"].AdapterUsage = lambda used, capacity, salts: (used, capacity, salts)
    made["lmcache.v1.distributed.api"].KeyEntry = lambda key, size: (key, size)
    made["lmcache.v1.distributed.api"].KeyListPage = lambda entries, token: (entries, token)
    return made


def key(i: int, **fields: Any) -> Any:
    """An `ObjectKey`."""
    values = {"chunk_hash": i.to_bytes(32, "big"), "model_name": "m", "kv_rank": 0, "object_group_id": 0}
    return Key(**{**values, "cache_salt": "", **fields})


class Key(SimpleNamespace):
    """Hashable, as the real one is."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash((self.chunk_hash, self.model_name, self.kv_rank, self.object_group_id, self.cache_salt))

    def to_encoded_object_key(self) -> str:
        return str(self.chunk_hash.hex())


def item(content: bytes) -> Any:
    """A `MemoryObj` of plain bytes."""
    data = bytearray(content)
    meta = SimpleNamespace(shapes=None, shape=(len(data),), dtypes=None, dtype="torch.uint8")
    return SimpleNamespace(byte_array=memoryview(data), meta=meta, data=data)
