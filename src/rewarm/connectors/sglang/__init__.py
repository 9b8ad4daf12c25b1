"""SGLang: pages that leave GPU and host memory are kept in a Rewarm store (HiCache's third level), and come back.

`RewarmHiCache` is a dynamic storage backend of the hierarchical cache: SGLang owns the copies between GPU and host
memory, and hands over pages of its host pool; they are moved in place. `rewarm connect sglang URL` prints the flags.
Importing this package imports no engine: the class is made when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["RewarmHiCache"]


def __getattr__(name: str) -> Any:
    """Import SGLang and make the class at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("rewarm.connectors.sglang.backend"), name)
    globals()[name] = value
    return value
