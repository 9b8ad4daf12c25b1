"""Fixtures of the connector tests: a vLLM that is not one, configurations, stores that can be made to fail."""

from __future__ import annotations

import importlib
import json
import struct
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.connectors import fake_vllm

Install = Callable[..., types.ModuleType]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a fake vLLM in place and import the connector over it."""

    def put(version: str = "0.32.0", random_seed: bool = False) -> types.ModuleType:
        for name, module in fake_vllm.modules(version, random_seed).items():
            monkeypatch.setitem(sys.modules, name, module)
        fake_vllm.forget_connector()
        return importlib.import_module("rewarm.connectors.vllm")

    yield put
    fake_vllm.forget_connector()


def write_weights(directory: Path, value: int = 0) -> Path:
    """A model's directory with one tensor of bytes and a configuration."""
    directory.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes([value]) * 64
    (directory / "model.safetensors").write_bytes(data)
    (directory / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    return directory


class HfConfig:
    """A configuration of transformers."""

    def __init__(self, **values: Any) -> None:
        self.values = {"hidden_size": 8, "rope_parameters": {"rope_theta": 10000.0}, **values}
        self._commit_hash = values.get("_commit_hash")

    def to_dict(self) -> dict[str, Any]:
        """As transformers'."""
        return dict(self.values)


def vllm_config(model: Path, **changes: Any) -> Any:
    """As much of a `VllmConfig` as the connector reads; `changes` by dotted name, with `__` for the dot."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            hf_config=HfConfig(_name_or_path=str(model), transformers_version="5.0"),
            quantization=None,
            dtype="torch.bfloat16",
            disable_sliding_window=False,
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor"),
        attention_config=SimpleNamespace(backend=None),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "secondary_tiers": [{"type": "RewarmTier", "module_path": "rewarm.connectors.vllm", "url": "memory:"}]
            },
        ),
    )
    for name, value in changes.items():
        *owners, last = name.split("__")
        owner = config
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


def offloading_config(**changes: Any) -> Any:
    """As much of an `OffloadingConfig` as the tier reads."""
    config = SimpleNamespace(
        groups=(SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer.0", "layer.1")),),
        worker_kv_bytes_per_block=8192,
        model=SimpleNamespace(name="model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )
    for name, value in changes.items():
        *owners, last = name.split("__")
        owner = config
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config
