"""The command line that starts LMCache's server over a Rewarm store, for one version of LMCache. Starts nothing."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

import msgspec

from rewarm.connectors.lmcache.versions import release_of
from rewarm.errors import ConfigError

MODEL_PLACE = "MODEL"
"""Stands in the command line for a model that was not given."""
ENGINE_PLACE = "ENGINE AND VERSION"
GIB = 1 << 30


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one server: LMCache's version, the command, and the JSON that is part of it."""

    version: str
    command: str
    l2_adapter: dict[str, Any]
    notes: list[str]


def launch(
    url: str,
    *,
    version: str,
    staging_bytes: int,
    model: str | None = None,
    engine: str | None = None,
    namespace: str | None = None,
) -> Launch:
    """The command line for `url`. `staging_bytes` is LMCache's own first level, through which every object passes.

    Raises `ConfigError` for a version that is not supported, a store that ends with the process, or a contradiction.
    """
    release_of(version)
    if url.startswith("memory:"):
        raise ConfigError(
            f"{url!r} ends with the server's process; give a directory: file:///mnt/nvme0/kv?capacity=2TiB"
        )
    if namespace and model:
        raise ConfigError("give either --model, whose weights keep blocks apart, or --namespace, which you answer for")
    named = {"namespace": namespace} if namespace else {"model": model or MODEL_PLACE, "engine": engine or ENGINE_PLACE}
    adapter = {
        "type": "plugin",
        "module_path": "rewarm.connectors.lmcache",
        "class_name": "RewarmL2Adapter",
        "adapter_params": {"url": url, **named},
    }
    text = shlex.quote(json.dumps(adapter, separators=(",", ":")))
    staging_gb = f"{math.ceil(staging_bytes / GIB * 100) / 100:g}"
    command = f"lmcache server --l1-size-gb {staging_gb} --eviction-policy LRU \\\n    --l2-adapter {text}"
    return Launch(version=version, command=command, l2_adapter=adapter, notes=_notes(adapter["adapter_params"]))


def _notes(params: object) -> list[str]:
    notes = [
        "Rewarm must be installed in the server's environment: pip install rewarm",
        """vLLM beside it: --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'""",
    ]
    open_places = [
        place for place in (MODEL_PLACE, ENGINE_PLACE) if isinstance(params, dict) and place in params.values()
    ]
    if open_places:
        notes.append(f"Put in {' and '.join(open_places)}, or give --model and --engine, or --namespace")
    return notes
