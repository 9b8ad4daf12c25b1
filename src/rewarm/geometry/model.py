"""What Rewarm knows of a model: its layers in order, how each one remembers, and how much arithmetic a token costs.

A `Model` is made by `load_model`, which checks every value, from a Hugging Face `config.json` or a bundled preset; one
made by hand is taken as it is. It does not know weights, engines or media.
"""

from __future__ import annotations

import enum

import msgspec

from rewarm.geometry.dtypes import DType


class LayerKind(enum.StrEnum):
    """How a layer remembers the tokens before."""

    FULL = "full"
    """Keys and values of every token: multi-head, multi-query or grouped-query attention."""
    SLIDING = "sliding_window"
    """Keys and values of the last `window` tokens."""
    MLA = "mla"
    """One latent vector and one rotary key per token, the same on every rank (multi-head latent attention)."""
    LINEAR = "linear"
    """A state of fixed size, reusable only at the positions where it was stored."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer. Dimensions are elements per head; what a kind does not use is 0.

    `key_dim` and `value_dim` are the cached head widths of FULL and SLIDING; for MLA they are the head widths that
    prefill computes with (d_qk, d_v), while `latent_dim` and `rope_dim` are cached. An MLA layer with `index_dim` has
    a sparse indexer (DSA) that caches one key of `index_dim` per token and lets `index_topk` tokens through.
    """

    kind: LayerKind
    query_heads: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    conv_elements: int = 0
    """LINEAR: elements of the convolution's state, kept in the model's KV dtype."""
    state_elements: int = 0
    """LINEAR: elements of the recurrent state, kept in `Model.state_dtype`."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the arithmetic sees it. `layers` is in order; equal layers are equal values."""

    name: str
    architecture: str
    layers: tuple[Layer, ...]
    active_parameters: int | None
    """Weights that one token is multiplied with; None when the configuration does not say enough."""
    active_parameters_source: str
    """`published`, `estimated` (see `parameters.py`) or `unknown`."""
    kv_dtype: DType = DType.BF16
    index_dtype: DType = DType.BF16
    state_dtype: DType = DType.FP32
    context_tokens: int | None = None
    """Longest context the configuration names."""

    def of_kind(self, kind: LayerKind) -> tuple[Layer, ...]:
        """The layers of one kind, in order."""
        return tuple(layer for layer in self.layers if layer.kind is kind)

    def layer_counts(self) -> dict[str, int]:
        """Number of layers by kind, kinds that occur only, in the order of `LayerKind`."""
        counts = {kind.value: len(self.of_kind(kind)) for kind in LayerKind}
        return {kind: count for kind, count in counts.items() if count}
