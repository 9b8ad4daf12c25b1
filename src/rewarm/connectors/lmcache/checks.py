"""Tries what a start of LMCache's server over a store depends on: has LMCache make the adapter, and moves one object.

The pool is made where there is none, as by the first start. The object lies in a namespace of its own, which is erased.
"""

from __future__ import annotations

import importlib
import json
import os
import select
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np

from rewarm.connectors.checking import Check, attempt
from rewarm.connectors.lmcache.keys import read_options, server_namespace
from rewarm.connectors.lmcache.versions import installed_version, release_of
from rewarm.errors import ConfigError, StorageError
from rewarm.tiers.opening import open_tier
from rewarm.units import format_size

OBJECT_BYTES = 1 << 20
NAME = "rewarm connect lmcache --check"
TIMEOUT_S = 30.0


def run_checks(adapter: dict[str, Any]) -> Iterator[Check]:
    """Try the parts of what `--l2-adapter` is given, one after the other; what cannot be tried has failed."""
    params = adapter["adapter_params"]
    yield from attempt(
        [
            ("LMCache", _version),
            ("interface", _interface),
            ("namespace", lambda: _namespace(params)),
            ("store and load", lambda: _round(adapter)),
        ]
    )


def _version() -> str:
    release_of(installed_version())
    return str(installed_version())


def _interface() -> str:
    """The class can be made from this LMCache, and leaves none of its abstract methods open."""
    made = importlib.import_module("rewarm.connectors.lmcache").RewarmL2Adapter
    if missing := sorted(made.__abstractmethods__):
        raise ConfigError(f"RewarmL2Adapter lacks {', '.join(missing)}: this LMCache asks for more than Rewarm knows")
    return "RewarmL2Adapter fits"


def _namespace(params: dict[str, Any]) -> str:
    return read_options(params, release_of(installed_version())).namespace.digest.hex()[:12]


def _round(adapter: dict[str, Any]) -> str:
    """One object through an adapter that LMCache has made."""
    params = {"url": adapter["adapter_params"]["url"], "namespace": NAME}
    memory = np.zeros(OBJECT_BYTES + 4096, np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][:OBJECT_BYTES]
    memory[:] = np.frombuffer(os.urandom(OBJECT_BYTES), np.uint8)
    content = memory.copy()
    with closing(_made({**adapter, "adapter_params": params}, memory)) as made:
        key, item = _object(memory)
        made.submit_store_task([key], [item])
        _wait(made.get_store_event_fd())
        (result,) = made.pop_completed_store_tasks().values()
        task = made.submit_lookup_and_lock_task([key], {})
        _wait(made.get_lookup_and_lock_event_fd())
        found = made.query_lookup_and_lock_result(task).popcount()
        memory[:] = 0
        task = made.submit_load_task([key], [item])
        _wait(made.get_load_event_fd())
        back = made.query_load_result(task).popcount() and np.array_equal(memory, content)
        made.submit_unlock([key])
        status = made.report_status()
    with open_tier(params["url"], namespace=server_namespace(params, release_of(installed_version()))) as store:
        store.erase()
    if not (result.is_successful() and found and back):
        raise StorageError(f"one object did not come back: {status['failures'] or 'it was not found'}")
    return f"{format_size(OBJECT_BYTES)} stored, found and loaded through {status['device']}"


def _made(adapter: dict[str, Any], memory: np.ndarray[Any, Any]) -> Any:
    adapters = importlib.import_module("lmcache.v1.distributed.l2_adapters")
    config = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
    describe = importlib.import_module("lmcache.v1.distributed.internal_api").L1MemoryDesc
    parsed = config.parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=[json.dumps(adapter)]))
    return adapters.create_l2_adapter(parsed.adapters[0], describe(memory.ctypes.data, memory.nbytes, 4096))


def _object(memory: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """A key that nobody has, and an object over all of the memory."""
    objects = importlib.import_module("lmcache.v1.memory_management")
    torch = importlib.import_module("torch")
    key = importlib.import_module("lmcache.v1.distributed.api").ObjectKey(os.urandom(32), "check", 0)
    meta = objects.MemoryObjMetadata(
        shape=torch.Size([memory.nbytes]),
        dtype=torch.uint8,
        address=0,
        phy_size=memory.nbytes,
        fmt=objects.MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return key, objects.TensorMemoryObj(torch.from_numpy(memory), meta, parent_allocator=None)


def _wait(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(TIMEOUT_S * 1000):
        raise StorageError(f"the adapter did not answer within {TIMEOUT_S:g} s")
    os.eventfd_read(descriptor)
