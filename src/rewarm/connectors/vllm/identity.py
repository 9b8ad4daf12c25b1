"""Which model a vLLM engine serves and in which shape its blocks are: the namespace that keeps wrong bytes apart.

vLLM's block hashes cover tokens, LoRA name and path, multimodal content, prompt embeddings and the cache salt of a
request; nothing about the model. Everything else that changes a block is put into the namespace here. What cannot be
known (a LoRA's weights, weights that come from no file) is refused unless the tier is given a `namespace` of its own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from rewarm.connectors.identity import named_namespace as by_name
from rewarm.connectors.identity import plain_config, text_of, weights_of
from rewarm.errors import ConfigError
from rewarm.geometry.fingerprint import is_commit
from rewarm.geometry.namespace import Namespace, model_namespace

_GIVE_A_NAME = 'add "namespace": "<name>" to the tier to answer for what shares its blocks yourself'


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What the connector knows of the engine and hands to the tier through the tier's own configuration."""

    config: dict[str, Any]
    """The model's whole configuration, with what the command line changed in it."""
    commit: str | None
    weights: str | None
    overrides: dict[str, Any]
    """What beside the configuration changes the bytes of a block."""
    hash_algorithm: str
    copies: int
    """Consecutive ranks that hold identical KV."""


def identify(vllm_config: Any, copies: int) -> Identity:
    """The identity of an engine, from its `VllmConfig`. Reads samples of every weight unless a commit is known.

    Raises `ConfigError` naming what is not known.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if vllm_config.lora_config is not None:
        raise ConfigError(f"LoRA adapters are on: vLLM's hashes name them but not their weights; {_GIVE_A_NAME}")
    if str(vllm_config.load_config.load_format) in ("dummy", "LoadFormat.DUMMY"):
        raise ConfigError(f"the weights are dummies that no file stands for; {_GIVE_A_NAME}")
    commit, weights = _weights(model)
    config = plain_config(model.hf_config)
    overrides = {
        "quantization": text_of(model.quantization),
        "attention_backend": text_of(vllm_config.attention_config.backend),
        "model_dtype": text_of(model.dtype),
        "cache_dtype": text_of(cache.cache_dtype),
        "cache_dtype_skip_layers": [str(layer) for layer in getattr(cache, "kv_cache_dtype_skip_layers", ())],
        "calculate_kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "disable_sliding_window": bool(model.disable_sliding_window),
        "context_tokens": int(model.max_model_len) if "longrope" in json.dumps(config) else None,
        "draft": _draft(vllm_config.speculative_config),
    }
    return Identity(
        config=config,
        commit=commit,
        weights=weights,
        overrides=overrides,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        copies=copies,
    )


def engine_namespace(identity: Identity, offloading: Any, row_bytes: int, layout_name: str) -> Namespace:
    """The namespace of an identified engine; `offloading` is vLLM's `OffloadingConfig`. Raises `ConfigError`."""
    shape = block_shape(offloading, row_bytes, layout_name)
    return model_namespace(
        config=identity.config,
        commit=identity.commit,
        fingerprint=identity.weights,
        overrides={**identity.overrides, "hash_algorithm": identity.hash_algorithm, "shape": shape},
        kv_dtype=_element(offloading.model.dtype),
        block_tokens=offloading.cache.tokens_per_hash,
        layout=str(offloading.kv_cache_layout or "not stated"),
        tp=offloading.parallel.tp_size,
        pp=offloading.parallel.pp_size,
        rank_split=not offloading.replicated_layout,
    )


def named_namespace(name: str, offloading: Any, row_bytes: int, layout_name: str) -> Namespace:
    """The namespace that a user named; blocks of another shape stay apart from it all the same."""
    shape = block_shape(offloading, row_bytes, layout_name)
    return by_name(name, {"layout": offloading.kv_cache_layout, "shape": shape})


def block_shape(offloading: Any, row_bytes: int, layout_name: str) -> dict[str, Any]:
    """Everything about the bytes of one block that vLLM's `OffloadingConfig` tells, and who lays them out."""
    parallel = offloading.parallel
    return {
        "engine": layout_name,
        "dtype": str(offloading.model.dtype),
        "row_bytes": row_bytes,
        "rank_bytes": offloading.worker_kv_bytes_per_block,
        "tokens_per_hash": offloading.cache.tokens_per_hash,
        "blocks_per_chunk": offloading.cache.blocks_per_chunk,
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "one_copy": bool(offloading.replicated_layout),
        "canonical": bool(offloading.canonical_layout),
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in offloading.groups],
    }


def _weights(model: Any) -> tuple[str | None, str | None]:
    """(commit, fingerprint) of the weights that a model configuration names; one of them is known."""
    directory = Path(str(getattr(model, "model_weights", "") or model.model))
    if directory.is_dir():
        return weights_of(directory)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if isinstance(commit, str) and is_commit(commit):
        return commit, None
    raise ConfigError(
        f"the weights of {model.model!r} are not known: it is no directory here and its configuration names no commit; "
        f"give --revision, or {_GIVE_A_NAME}"
    )


def _draft(speculative: Any) -> dict[str, Any] | None:
    """A draft model keeps KV in the same blocks."""
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return {"method": text_of(speculative.method)}
    commit, weights = _weights(draft)
    return {
        "method": text_of(speculative.method),
        "commit": commit,
        "weights": weights,
        "config": plain_config(draft.hf_config),
    }


def _element(dtype: str) -> str:
    """The element type in Rewarm's words; special layouts of an element type are told apart by the shape's `dtype`."""
    return "fp8" if dtype.startswith("fp8") and dtype != "fp8_e5m2" else dtype


def short_digest(namespace: Namespace) -> str:
    """Twelve hex digits, enough to tell namespaces apart in a log."""
    return hashlib.sha256(namespace.text.encode()).hexdigest()[:12]
