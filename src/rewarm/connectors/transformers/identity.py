"""Which model serves, as a namespace: a loaded model is told from others by its own tensors, not by where it came from.

Everything that changes the KV of given tokens is part of it, or is refused with what to do: other weights never hit.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

from rewarm.connectors.common import version_of
from rewarm.connectors.vllm.identity import NAMED_SCHEMA, plain_config
from rewarm.errors import ConfigError
from rewarm.geometry.fingerprint import SAMPLE_BYTES
from rewarm.geometry.namespace import Namespace, model_namespace

SUPPORTED = ("5",)
"""Major versions whose cache this reads: the tensors of a layer are `cache.layers[i].keys` and `.values`."""
MOVING_ROPE = ("dynamic", "longrope")
"""Their keys depend on the length of the whole prompt, so a prefix is not the same in a longer one."""


def engine_version() -> str:
    """The version of Transformers here. Raises `ConfigError` without one, or with another major version than ours."""
    version = version_of("transformers")
    if version is None:
        raise ConfigError("Transformers is not installed here; install Rewarm into its environment")
    if version.partition(".")[0] not in SUPPORTED:
        raise ConfigError(f"Transformers {version} is not supported by this Rewarm; supported: {', '.join(SUPPORTED)}")
    return version


def check_model(model: Any) -> None:
    """Raise `ConfigError` for a model whose KV does not follow from weights and tokens alone."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder and a decoder: its cache is not that of a prompt's prefix")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise ConfigError(f"{name} has adapters that can be switched; merge them into the weights first")
    for rope in _rope_types(config.to_dict()):
        if any(moving in rope for moving in MOVING_ROPE):
            raise ConfigError(f"{name} has RoPE of type {rope}: its keys depend on the length of the whole prompt")


def namespace_of(model: Any, layout: Mapping[str, Any], block_tokens: int, name: str | None) -> Namespace:
    """The namespace of a loaded model, or of a `name` that stands for its weights and configuration.

    `layout` is the shape of its blocks, as JSON values. Raises `ConfigError` naming what cannot be known.
    """
    release = ".".join(engine_version().split(".")[:2])
    shape = {**layout, "block_tokens": block_tokens, "engine": f"transformers {release} {model.device.type}"}
    if name is not None:
        if not name.strip():
            raise ConfigError("namespace is empty; leave it out, or give a name")
        parts = {"schema": NAMED_SCHEMA, "name": name, "shape": shape}
        return Namespace(json.dumps(parts, sort_keys=True, separators=(",", ":")))
    attention = getattr(model.config, "_attn_implementation", None)
    return model_namespace(
        config=plain_config(model.config),
        fingerprint=live_fingerprint(model),
        overrides={"attention": str(attention), "shape": shape},
        kv_dtype=str(layout["dtype"]),
        block_tokens=block_tokens,
        layout="layers; keys, then values; heads, tokens, elements",
        tp=1,
        pp=1,
        rank_split=False,
    )


def live_fingerprint(model: Any) -> str:
    """SHA-256, 64 hex digits, over name, dtype, shape and samples of every parameter and buffer of a loaded model.

    Samples as in `geometry.weights_fingerprint`: 4 KiB from the start, the middle and the end. Raises `ConfigError`
    for tensors that are not on this machine, or only a part of them.
    """
    torch: Any = importlib.import_module("torch")
    whole = hashlib.sha256(b"rewarm live weights 1\0")
    for name, tensor in sorted(_tensors(model).items()):
        if tensor.device.type == "meta" or hasattr(tensor, "device_mesh"):
            raise ConfigError(f"{name} is not in memory as a whole (offloaded, or split over ranks); give a namespace")
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        whole.update(len(head).to_bytes(8, "little") + head)
        flat = tensor.detach().reshape(-1)
        count = max(1, SAMPLE_BYTES // tensor.element_size())
        starts = (0, (len(flat) - count) // 2, len(flat) - count) if len(flat) > 3 * count else (0,)
        for start in starts:
            sample = flat[start : start + count] if len(starts) > 1 else flat
            whole.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def stamp(model: Any) -> int:
    """A number that changes when a parameter is replaced or written in place: by training, by loading other weights."""
    return hash(tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in model.parameters()))


def _tensors(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _rope_types(value: Any) -> list[str]:
    """Every `rope_type` (formerly `type`) of a configuration, wherever it stands."""
    if not isinstance(value, Mapping):
        return []
    own = value.get("rope_type", value.get("type")) if "rope_theta" in value or "rope_type" in value else None
    return [*([str(own)] if own else []), *(rope for item in value.values() for rope in _rope_types(item))]
