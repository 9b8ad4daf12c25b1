"""Rewarm keeps the KV cache of large language models on flash and gives it back at the speed of the medium.

`rewarm.open(url)` opens a store; the other names are the types of its answers and its errors. Names load on first
use, so `import rewarm` costs no more than this file. Everything else lives in the rooms: `rewarm.geometry`,
`rewarm.store`, `rewarm.bench` and so on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rewarm.errors import (
    ConfigError,
    FormatError,
    MisuseError,
    NamespaceMismatch,
    PoolInUse,
    RewarmError,
    StorageError,
)

if TYPE_CHECKING:
    from rewarm.store.contract import Outcome, Presence, Stats, Store, Transfer
    from rewarm.tiers.opening import open_tier as open

__version__ = "0.1.0"

_HOMES = {
    "Outcome": "rewarm.store.contract:Outcome",
    "Presence": "rewarm.store.contract:Presence",
    "Stats": "rewarm.store.contract:Stats",
    "Store": "rewarm.store.contract:Store",
    "Transfer": "rewarm.store.contract:Transfer",
    "open": "rewarm.tiers.opening:open_tier",
}
"""Where the names that need numpy live: the command line's help must not wait for it."""

__all__ = [
    "ConfigError",
    "FormatError",
    "MisuseError",
    "NamespaceMismatch",
    "Outcome",
    "PoolInUse",
    "Presence",
    "RewarmError",
    "Stats",
    "StorageError",
    "Store",
    "Transfer",
    "__version__",
    "open",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rewarm' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
