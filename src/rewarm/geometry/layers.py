"""Turns the fields of a configuration into layers: which layer has a window, a latent or a recurrent state.

The rules are those of the configuration classes in Hugging Face `transformers`, which engines follow as well.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rewarm.geometry.fields import HEAD_DIM_MAX, HEADS_MAX, LAYERS_MAX, TOKENS_MAX, Fields
from rewarm.geometry.model import Layer, LayerKind

_KINDS = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "linear_attention": LayerKind.LINEAR,
}


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration class assumes for a field that the file leaves out. None: derived, or refused."""

    query_heads: int | None = None
    kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    window: int | None = None


LayerReader = Callable[[Fields, Defaults], tuple[Layer, ...]]
WindowRule = Callable[[Fields, int], tuple[LayerKind, ...]]


def layer_count(fields: Fields) -> int:
    """num_hidden_layers."""
    return fields.count("num_hidden_layers", LAYERS_MAX)


def query_heads(fields: Fields, defaults: Defaults) -> int:
    """num_attention_heads, or what the class assumes."""
    if defaults.query_heads is not None:
        return fields.count_or("num_attention_heads", defaults.query_heads, HEADS_MAX)
    return fields.count("num_attention_heads", HEADS_MAX)


def grouped(fields: Fields, defaults: Defaults) -> Layer:
    """The full-attention layer of a model with shared key/value heads."""
    heads = query_heads(fields, defaults)
    kv_heads = fields.count_or("num_key_value_heads", defaults.kv_heads or heads, HEADS_MAX)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"({kv_heads}) does not divide num_attention_heads ({heads})")
    head_dim = fields.maybe("head_dim", most=HEAD_DIM_MAX) or defaults.head_dim or _head_dim(fields, heads)
    return Layer(kind=LayerKind.FULL, query_heads=heads, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim)


def _head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.count("hidden_size")
    if hidden % heads:
        raise fields.refuse(
            "hidden_size", f"({hidden}) is no multiple of num_attention_heads ({heads}) and head_dim is missing"
        )
    if hidden // heads > HEAD_DIM_MAX:
        raise fields.refuse("hidden_size", f"({hidden}) over num_attention_heads ({heads}) is no head width")
    return hidden // heads


def attention_layers(rule: WindowRule, *, honours_layer_types: bool) -> LayerReader:
    """A reader for full and window layers. `rule` gives the kinds where the file has no `layer_types`."""

    def read(fields: Fields, defaults: Defaults) -> tuple[Layer, ...]:
        full = grouped(fields, defaults)
        kinds = _kinds(fields, rule, honours_layer_types)
        if LayerKind.LINEAR in kinds:
            raise fields.refuse("layer_types", "has linear_attention, which this architecture does not know")
        if LayerKind.SLIDING not in kinds:
            return (full,) * len(kinds)
        window = _window(fields, defaults)
        if window is None:
            raise fields.refuse("sliding_window", "is missing, but layers with sliding attention need it")
        sliding = msgspec.structs.replace(full, kind=LayerKind.SLIDING, window=window)
        return tuple(sliding if kind is LayerKind.SLIDING else full for kind in kinds)

    return read


def _kinds(fields: Fields, rule: WindowRule, honours_layer_types: bool) -> tuple[LayerKind, ...]:
    count = layer_count(fields)
    names = fields.strings("layer_types")
    if names is None:
        return rule(fields, count)
    unknown = sorted(set(names) - set(_KINDS))
    if unknown:
        raise fields.refuse("layer_types", f"has {unknown[0]!r}, which is not understood; known: {', '.join(_KINDS)}")
    if len(names) != count:
        raise fields.refuse("layer_types", f"has {len(names)} entries for num_hidden_layers = {count}")
    kinds = tuple(_KINDS[name] for name in names)
    if not honours_layer_types and kinds != rule(fields, count):
        raise fields.refuse("layer_types", "differs from what this architecture does with its layers")
    return kinds


def _window(fields: Fields, defaults: Defaults) -> int | None:
    return fields.maybe("sliding_window", most=TOKENS_MAX) or defaults.window


def no_window(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """Every layer remembers everything, whatever `sliding_window` says."""
    return (LayerKind.FULL,) * count


def window_everywhere(assumed: bool) -> WindowRule:
    """All layers have the window if there is one; `assumed`: the class has one where the file is silent."""

    def rule(fields: Fields, count: int) -> tuple[LayerKind, ...]:
        on = "sliding_window" in fields or (assumed and not fields.says_null("sliding_window"))
        return (LayerKind.SLIDING if on else LayerKind.FULL,) * count

    return rule


def switched_everywhere(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """All layers have the window if `use_sliding_window` (Qwen3-MoE)."""
    return (LayerKind.SLIDING if _switched(fields) else LayerKind.FULL,) * count


def switched_tail(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """Layers from `max_window_layers` (28) on have the window if `use_sliding_window` (Qwen2, Qwen3)."""
    first = fields.count_or("max_window_layers", 28, LAYERS_MAX, least=0) if _switched(fields) else count
    return tuple(LayerKind.SLIDING if i >= first else LayerKind.FULL for i in range(count))


def switched_alternate(fields: Fields, count: int) -> tuple[LayerKind, ...]:
    """Even layers below `max_window_layers` (28) have the window if `use_sliding_window` (Qwen2-MoE)."""
    last = fields.count_or("max_window_layers", 28, LAYERS_MAX, least=0) if _switched(fields) else 0
    return tuple(LayerKind.SLIDING if i < last and i % 2 == 0 else LayerKind.FULL for i in range(count))


def window_pattern(every: int) -> WindowRule:
    """All but each `sliding_window_pattern`-th layer have the window; `every` is the pattern the class assumes."""

    def rule(fields: Fields, count: int) -> tuple[LayerKind, ...]:
        step = fields.count_or("sliding_window_pattern", every, LAYERS_MAX)
        return tuple(LayerKind.FULL if (i + 1) % step == 0 else LayerKind.SLIDING for i in range(count))

    return rule


def _switched(fields: Fields) -> bool:
    return fields.flag("use_sliding_window", False)


def latent_layers(fields: Fields, defaults: Defaults) -> tuple[Layer, ...]:
    """Multi-head latent attention (DeepSeek-V2, V3, Kimi-K2)."""
    if "index_head_dim" in fields:
        raise fields.refuse("index_head_dim", "asks for a sparse indexer, which this architecture does not have")
    return (_latent(fields, defaults),) * layer_count(fields)


def indexed_layers(fields: Fields, defaults: Defaults) -> tuple[Layer, ...]:
    """Latent attention with a sparse indexer in every layer (DeepSeek-V3.2)."""
    layer = msgspec.structs.replace(
        _latent(fields, defaults),
        index_heads=fields.count("index_n_heads", HEADS_MAX),
        index_dim=fields.count("index_head_dim", HEAD_DIM_MAX),
        index_topk=fields.count("index_topk", TOKENS_MAX),
    )
    return (layer,) * layer_count(fields)


def _latent(fields: Fields, defaults: Defaults) -> Layer:
    rope_dim = fields.count("qk_rope_head_dim", HEAD_DIM_MAX)
    return Layer(
        kind=LayerKind.MLA,
        query_heads=query_heads(fields, defaults),
        key_dim=fields.count("qk_nope_head_dim", HEAD_DIM_MAX) + rope_dim,
        value_dim=fields.count("v_head_dim", HEAD_DIM_MAX),
        latent_dim=fields.count("kv_lora_rank", HEAD_DIM_MAX),
        rope_dim=rope_dim,
    )


def delta_net_layers(fields: Fields, defaults: Defaults) -> tuple[Layer, ...]:
    """Gated delta-net layers with full attention in every `full_attention_interval`-th (Qwen3-Next, Qwen3.5).

    A state is H_v d_k d_v elements and (kernel - 1) (2 H_k d_k + H_v d_v) elements of the convolution.
    """

    def interval(fields: Fields, count: int) -> tuple[LayerKind, ...]:
        step = fields.count_or("full_attention_interval", 4, LAYERS_MAX)
        return tuple(LayerKind.FULL if (i + 1) % step == 0 else LayerKind.LINEAR for i in range(count))

    kinds = _kinds(fields, interval, True)
    if LayerKind.SLIDING in kinds:
        raise fields.refuse("layer_types", "has sliding_attention, which this architecture does not know")
    full, linear = grouped(fields, defaults), _delta_net(fields)
    return tuple(full if kind is LayerKind.FULL else linear for kind in kinds)


def _delta_net(fields: Fields) -> Layer:
    key_heads = fields.count("linear_num_key_heads", HEADS_MAX)
    value_heads = fields.count("linear_num_value_heads", HEADS_MAX)
    if value_heads % key_heads:
        raise fields.refuse(
            "linear_num_value_heads", f"({value_heads}) is no multiple of linear_num_key_heads ({key_heads})"
        )
    key_dim = fields.count("linear_key_head_dim", HEAD_DIM_MAX)
    value_dim = fields.count("linear_value_head_dim", HEAD_DIM_MAX)
    kernel = fields.count("linear_conv_kernel_dim", HEAD_DIM_MAX)
    return Layer(
        kind=LayerKind.LINEAR,
        query_heads=key_heads,
        kv_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_elements=(kernel - 1) * (2 * key_heads * key_dim + value_heads * value_dim),
        state_elements=value_heads * key_dim * value_dim,
    )
