"""vLLM: KV blocks that leave GPU and DRAM go to a Rewarm store, and come back from it after eviction or a restart.

Two classes that vLLM finds by `kv_connector_module_path` and `module_path`:

* `RewarmTier`: the secondary tier of vLLM's tiering offload. It owns the store and is all that moves blocks.
* `RewarmConnector`: vLLM's own offloading connector, which also tells the tier which model it serves (the namespace),
  refuses hash seeds that change with the process, and bounds how long a request may wait for a restore.

Both are made when they are first asked for: importing this package imports no engine. `rewarm connect vllm URL` prints
the configuration. The CPU platform needs `rewarm.connectors.vllm_cpu` beside this; GPUs never load it.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"RewarmConnector": "rewarm.connectors.vllm.connector", "RewarmTier": "rewarm.connectors.vllm.tier"}

__all__ = ["RewarmConnector", "RewarmTier"]


def __getattr__(name: str) -> Any:
    """Import vLLM and make a class at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
