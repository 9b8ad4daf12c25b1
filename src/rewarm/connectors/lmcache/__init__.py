"""LMCache: the objects of its multiprocess server are kept in a Rewarm store, and found again by the next server.

LMCache loads the class by `--l2-adapter '{"type": "plugin", "module_path": "rewarm.connectors.lmcache", "class_name":
"RewarmL2Adapter", "adapter_params": {..}}'`; `rewarm connect lmcache URL` prints all of it. The class is made when it
is first asked for: importing this package imports no LMCache. Its in-process engine is deprecated and not supported.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["RewarmL2Adapter"]


def __getattr__(name: str) -> Any:
    """Import LMCache and make the class at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.adapter").RewarmL2Adapter
