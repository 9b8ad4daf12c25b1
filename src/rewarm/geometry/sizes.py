"""How many bytes a model's KV cache takes, all ranks together, each head once.

Per token and layer, with b bytes per element (Shazeer 2019 for shared heads; DeepSeek-V2 report, section 2.1, for MLA):
full and window attention H_kv (d_k + d_v) b; MLA (r_kv + d_rope) b; a sparse indexer adds d_idx b_idx. A window layer
keeps min(n, W) tokens, a linear layer one state whatever n. Replicas and ranks are `parallel.py`'s business.
"""

from __future__ import annotations

from rewarm.errors import ConfigError
from rewarm.geometry.dtypes import DType, parse_dtype
from rewarm.geometry.model import Layer, LayerKind, Model

TOKENS_MAX = 1 << 40
"""No context is longer; above it is a slip of units."""


def layer_bytes_per_token(layer: Layer, kv_dtype: DType, index_dtype: DType) -> int:
    """Bytes that one token adds to one layer while it is remembered; 0 for a linear layer."""
    match layer.kind:
        case LayerKind.FULL | LayerKind.SLIDING:
            return layer.kv_heads * (layer.key_dim + layer.value_dim) * kv_dtype.width
        case LayerKind.MLA:
            return (layer.latent_dim + layer.rope_dim) * kv_dtype.width + layer.index_dim * index_dtype.width
        case LayerKind.LINEAR:
            return 0


def layer_state_bytes(layer: Layer, kv_dtype: DType, state_dtype: DType) -> int:
    """Bytes of one stored state of a linear layer; 0 for the others."""
    return layer.conv_elements * kv_dtype.width + layer.state_elements * state_dtype.width


def kv_dtype_of(model: Model, kv_dtype: DType | str | None) -> DType:
    """The dtype given, or the model's own."""
    return model.kv_dtype if kv_dtype is None else parse_dtype(kv_dtype)


def bytes_per_token(model: Model, kv_dtype: DType | str | None = None) -> int:
    """Bytes that one more token adds once every window is full: layers that remember all tokens, each head once.

    For a model without window or linear layers this is its bytes per token at any length. 0 when no layer remembers
    everything.
    """
    dtype = kv_dtype_of(model, kv_dtype)
    return sum(
        layer_bytes_per_token(layer, dtype, model.index_dtype)
        for layer in model.layers
        if layer.kind is not LayerKind.SLIDING
    )


def bytes_total(model: Model, tokens: int, kv_dtype: DType | str | None = None) -> int:
    """Bytes needed to continue after `tokens` tokens: window layers min(n, W) tokens, linear layers one state."""
    tokens = check_tokens(tokens)
    dtype = kv_dtype_of(model, kv_dtype)
    return sum(layer_bytes_total(layer, tokens, dtype, model) for layer in model.layers)


def layer_bytes_total(layer: Layer, tokens: int, kv_dtype: DType, model: Model) -> int:
    """Bytes of one layer after `tokens` tokens."""
    kept = min(tokens, layer.window) if layer.kind is LayerKind.SLIDING else tokens
    state = layer_state_bytes(layer, kv_dtype, model.state_dtype) if tokens else 0
    return kept * layer_bytes_per_token(layer, kv_dtype, model.index_dtype) + state


def state_bytes(model: Model, kv_dtype: DType | str | None = None) -> int:
    """Bytes of one checkpoint of all linear layers; 0 for a model without them."""
    dtype = kv_dtype_of(model, kv_dtype)
    return sum(layer_state_bytes(layer, dtype, model.state_dtype) for layer in model.layers)


def check_tokens(tokens: int, name: str = "tokens") -> int:
    """`tokens` if it is a count of tokens, else `ConfigError` naming it."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= TOKENS_MAX:
        raise ConfigError(f"{name} must be a whole number from 0 to {TOKENS_MAX}, got {tokens!r}")
    return tokens
