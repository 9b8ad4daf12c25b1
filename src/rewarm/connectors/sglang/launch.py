"""The command line that starts SGLang over a Rewarm store, and a try of everything that the start depends on.

Builds text and tries parts; starts no engine, makes no pool. The round trip goes through the class that SGLang's
factory loads, over memory laid out as a host pool's, into a store in memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec

from rewarm.connectors.checking import Check, attempt
from rewarm.connectors.identity import weights_of
from rewarm.connectors.places import check_lasting, try_directories, try_pools
from rewarm.connectors.releases import installed
from rewarm.connectors.sglang.identity import check_version, find_weights
from rewarm.connectors.vllm.launch import MODEL_PLACE, command_lines
from rewarm.errors import ConfigError

TESTED = "0.5.23"
LAYOUT = "page_first_direct"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the engine: its version, its command, and the JSON that is part of it."""

    version: str
    command: str
    extra_config: dict[str, Any]
    notes: list[str]


def launch(
    url: str,
    *,
    version: str | None = None,
    model: str | None = None,
    tensor_parallel: int = 1,
    namespace: str | None = None,
) -> Launch:
    """The command line for `url`. Raises `ConfigError` for a version or a store that does not fit."""
    check_version(version or TESTED)
    check_lasting(url)
    config = extra_config(url, namespace=namespace)
    arguments = ["python", "-m", "sglang.launch_server", "--model-path", model or MODEL_PLACE]
    if tensor_parallel > 1:
        arguments += ["--tp-size", str(tensor_parallel)]
    arguments += ["--page-size", "64", "--enable-hierarchical-cache", "--hicache-mem-layout", LAYOUT]
    arguments += ["--hicache-io-backend", "direct", "--hicache-storage-prefetch-policy", "timeout"]
    arguments += ["--hicache-storage-backend", "dynamic"]
    arguments += ["--hicache-storage-backend-extra-config", json.dumps(config, separators=(",", ":"))]
    notes = ["Rewarm must be installed in SGLang's environment: pip install rewarm"]
    return Launch(version=version or TESTED, command=command_lines(arguments), extra_config=config, notes=notes)


def extra_config(url: str, *, namespace: str | None = None) -> dict[str, Any]:
    """The value of `--hicache-storage-backend-extra-config`."""
    config: dict[str, Any] = {
        "backend_name": "rewarm",
        "module_path": "rewarm.connectors.sglang",
        "class_name": "RewarmHiCache",
        "interface_v1": 1,
        "url": url,
    }
    return config if namespace is None else {**config, "namespace": namespace}


def run_checks(url: str, model: str | None) -> Iterator[Check]:
    """Try the parts one after the other."""
    yield from attempt(
        [
            ("engine", _engine),
            ("interface", _round_trip),
            ("directory", lambda: try_directories(url)),
            ("pool", lambda: try_pools(url)),
            *([("weights", lambda: _weights(model))] if model else []),
        ]
    )


def _engine() -> str:
    version = installed("sglang")
    if version is None:
        raise ConfigError("SGLang is not installed here; run this in SGLang's own environment")
    try:
        importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    except ImportError as error:
        raise ConfigError(f"SGLang {version} cannot be imported here: {error}") from error
    return f"SGLang {check_version(version)}"


def _weights(model: str) -> str:
    commit, fingerprint = weights_of(find_weights(model, None))
    return f"commit {commit}" if commit else f"fingerprint {str(fingerprint)[:12]}"


def _round_trip() -> str:
    """Two pages through the class that SGLang's factory makes."""
    try:
        storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        factory: Any = importlib.import_module("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
        torch: Any = importlib.import_module("torch")
        fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        config = storage.HiCacheStorageConfig(
            **fields,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="rewarm check",
            extra_config=extra_config("memory:", namespace="rewarm check"),
        )
        backend = factory.create_backend("dynamic", config, None)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"this SGLang asks for more than Rewarm knows: {error}") from error
    content = torch.arange(2 * 4096, dtype=torch.int32).view(torch.uint8).reshape(2, -1).clone()
    right, indices = content.clone(), torch.arange(2)
    backend.register_mem_pool_host(_Pool(content))
    stored = backend.batch_set_v1(["a" * 64, "b" * 64], indices)
    content.zero_()
    held = backend.batch_exists(["a" * 64, "b" * 64])
    good = backend.batch_get_v1(["a" * 64, "b" * 64], indices)
    backend.close()
    if not (all(stored) and held == 2 and all(good) and content.equal(right)):
        raise ConfigError(f"two pages did not come back: stored {stored}, held {held}, read {good}")
    return "RewarmHiCache fits; two pages came back"


class _Pool(SimpleNamespace):
    """Two pages of one token, laid out as a host pool's."""

    def __init__(self, content: Any) -> None:
        super().__init__(kv_buffer=content, layout=LAYOUT, page_size=1, dtype=content.dtype)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes of pages."""
        width = self.kv_buffer.shape[1]
        return [self.kv_buffer.data_ptr() + int(index) * width for index in indices], [width] * len(indices)
