"""Transformers: the KV of a prompt's prefix is kept in a Rewarm store and restored before `generate` computes the rest.

    with PrefixCache("file:///mnt/nvme0/kv?capacity=2TiB", model) as cache:
        output = cache.generate(input_ids, max_new_tokens=64)

Models whose layers attend to tokens, in full or within a sliding window; others are refused by name. Importing this
package imports no torch: `PrefixCache` is made when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewarm.connectors.transformers.cache import PrefixCache

__all__ = ["PrefixCache"]


def __getattr__(name: str) -> Any:
    """Import torch and the class at their first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("rewarm.connectors.transformers.cache"), name)
    globals()[name] = value
    return value
