"""Runs inside LMCache's own environment: imports one LMCache, then forks one server per connection.

A server here is LMCache's `StorageManager`, whole: its first level of memory, its controllers and their threads, and
our plug-in as its second level; only the transport to an engine is left out. Forks and their protocol: tests/forks.py.

    host.py SOCKET
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import time
from typing import Any

import numpy as np
from tests.forks import serve

WAIT_S = 60.0
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="WARNING")

torch = importlib.import_module("torch")
api = importlib.import_module("lmcache.v1.distributed.api")
config = importlib.import_module("lmcache.v1.distributed.config")
adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
managers = importlib.import_module("lmcache.v1.distributed.storage_manager")


class Server:
    """One `StorageManager` over one adapter; each method answers one request."""

    def __init__(self) -> None:
        self._manager: Any = None

    def start(self, adapter: dict[str, Any], l1_bytes: int) -> dict[str, Any]:
        """Make the manager. `adapter` is the value of `--l2-adapter`."""
        parsed = adapters.parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter)]))
        memory = config.L1MemoryManagerConfig(l1_bytes, use_lazy=False, shm_name="")
        self._manager = managers.StorageManager(
            config.StorageManagerConfig(
                l1_manager_config=config.L1ManagerConfig(memory),
                eviction_config=config.EvictionConfig("noop"),
                l2_adapter_config=parsed,
            )
        )
        return {"pid": os.getpid()}

    def store(self, seed: int, count: int, **kind: Any) -> dict[str, Any]:
        """Write objects into the first level and wait until the second has answered; returns how many fitted."""
        keys, layout = _keys(seed, count, **kind), _layout(**kind)
        objects = self._manager.reserve_write(keys, layout)
        for i, key in enumerate(keys):
            if key in objects:
                view = _bytes(objects[key])
                view[:] = _content(seed, i, len(view))
        self._manager.finish_write(list(objects))
        self._settle()
        return {"written": len(objects)}

    def load(self, seed: int, count: int, *, clear: bool = True, **kind: Any) -> dict[str, Any]:
        """Prefetch objects as for a prompt, after emptying the first level: which are there, and whether they are
        right. Locks are given back."""
        if clear:
            self._manager.clear()
        keys, layout = _keys(seed, count, **kind), _layout(**kind)
        spec = api.PrefetchTaskSpec([api.GroupedObjectKeys(keys, 0, layout)], fetching_policy="full")
        handle = self._manager.submit_prefetch_task(spec)
        result = self._wait(lambda: self._manager.query_prefetch_status(handle))
        hits = result.hit_cells[0].get_indices_list()
        right = []
        if hits:
            with self._manager.read_prefetched_results([keys[i] for i in hits]) as objects:
                right = [
                    i
                    for i, item in zip(hits, objects or [], strict=False)
                    if np.array_equal(_bytes(item), _content(seed, i, len(_bytes(item))))
                ]
            self._manager.finish_read_prefetched([keys[i] for i in hits])
        return {"hits": hits, "right": right, "from_l2": result.l2_hit_count}

    def delete(self, seed: int, count: int, **kind: Any) -> dict[str, Any]:
        """Delete objects from the second level."""
        self._adapter().delete(_keys(seed, count, **kind))
        return {}

    def keys(self, page_size: int) -> dict[str, Any]:
        """Everything that the second level lists: hash and bytes, and the pages that took."""
        found, pages, cursor = [], 0, None
        while True:
            page = self._adapter().list_l2_keys(page_size=page_size, cursor=cursor)
            found += [(entry.key.chunk_hash_hex, entry.size_bytes) for entry in page.entries]
            pages, cursor = pages + 1, page.next_page_token
            if cursor is None:
                return {"keys": found, "pages": pages}

    def status(self) -> dict[str, Any]:
        """What manager and adapter report."""
        usage = self._adapter().get_usage()
        status = self._manager.report_status()
        return {
            "adapter": status["l2_adapters"][0],
            "l1": status["l1_manager"],
            "salts": dict(usage.bytes_by_cache_salt),
            "used_bytes": usage.total_bytes_used,
            "healthy": status["is_healthy"],
        }

    def tags(self) -> dict[str, Any]:
        """The memory tags of the adapter, as LMCache 0.5.7 asks for them."""
        tags = self._adapter().get_memory_tags()
        return {"tags": [tags.segment.value, tags.residency.value]}

    def close(self) -> dict[str, Any]:
        """End as LMCache's server does."""
        self._manager.close()
        return {}

    def _adapter(self) -> Any:
        return self._manager.l2_adapters()[0][1]

    def _settle(self) -> None:
        """Until the store controller has handed everything over and has got its answers."""

        def settled() -> bool | None:
            status = self._manager.report_status()["store_controller"]
            return (status["pending_keys_count"] + status["in_flight_task_count"] == 0) or None

        self._wait(settled)
        time.sleep(0.02)  # between taking keys off its list and submitting them the controller counts them nowhere
        self._wait(settled)

    def _wait(self, ask: Any) -> Any:
        end_s = time.monotonic() + WAIT_S
        while (answer := ask()) is None:
            assert time.monotonic() < end_s, "LMCache did not answer in time"
            time.sleep(0.002)
        return answer


def _keys(seed: int, count: int, *, salt: str = "", model: str = "m", **_rest: Any) -> list[Any]:
    rank = api.ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [
        api.ObjectKey(seed.to_bytes(16, "big") + i.to_bytes(16, "big"), model, rank, cache_salt=salt)
        for i in range(count)
    ]


def _layout(*, dtype: str = "bfloat16", tokens: int = 64, **_rest: Any) -> Any:
    """Objects of `tokens` x 2 KiB in two-byte types."""
    return api.MemoryLayoutDesc([torch.Size([2, 4, tokens, 128])], [getattr(torch, dtype)])


def _bytes(item: Any) -> Any:
    return np.frombuffer(memoryview(item.byte_array).cast("B"), np.uint8)


def _content(seed: int, i: int, length: int) -> Any:
    return np.random.default_rng([seed, i]).integers(0, 256, length, np.uint8)


if __name__ == "__main__":
    importlib.import_module("rewarm.connectors.lmcache.adapter")
    logging.basicConfig(level=logging.WARNING)
    serve(sys.argv[1], Server)
