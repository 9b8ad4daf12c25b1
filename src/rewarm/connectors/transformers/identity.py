"""Which model serves, as a namespace: a loaded model is told from others by its own tensors, not by where it came from.

Everything that changes the KV of given tokens is part of it, or is refused with what to do: other weights never hit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rewarm.connectors.identity import live_fingerprint, named_namespace, plain_config
from rewarm.connectors.releases import installed, release_of
from rewarm.errors import ConfigError
from rewarm.geometry.fields import rope_types
from rewarm.geometry.namespace import Namespace, model_namespace

SUPPORTED = ("5",)
"""Major versions whose cache this reads: the tensors of a layer are `cache.layers[i].keys` and `.values`."""
MOVING_ROPE = ("dynamic", "longrope")
"""Their keys depend on the length of the whole prompt, so a prefix is not the same in a longer one."""


def engine_version() -> str:
    """The version of Transformers here. Raises `ConfigError` without one, or with another major version than ours."""
    version = installed("transformers")
    release_of(version, "Transformers", SUPPORTED)
    return str(version)


def check_model(model: Any) -> None:
    """Raise `ConfigError` for a model whose KV does not follow from weights and tokens alone."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise ConfigError(f"{name} is an encoder and a decoder: its cache is not that of a prompt's prefix")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise ConfigError(f"{name} has adapters that can be switched; merge them into the weights first")
    for rope in rope_types(config.to_dict()):
        if any(moving in rope for moving in MOVING_ROPE):
            raise ConfigError(f"{name} has RoPE of type {rope}: its keys depend on the length of the whole prompt")


def namespace_of(model: Any, layout: Mapping[str, Any], block_tokens: int, name: str | None) -> Namespace:
    """The namespace of a loaded model, or of a `name` that stands for its weights and configuration.

    `layout` is the shape of its blocks, as JSON values. Raises `ConfigError` naming what cannot be known.
    """
    release = ".".join(engine_version().split(".")[:2])
    shape = {**layout, "block_tokens": block_tokens, "engine": f"transformers {release} {model.device.type}"}
    if name is not None:
        return named_namespace(name, {"shape": shape})
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


def stamp(model: Any) -> int:
    """A number that changes when a parameter is replaced or written in place: by training, by loading other weights."""
    return hash(tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in model.parameters()))
