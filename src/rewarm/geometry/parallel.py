"""What each rank of a tensor and pipeline parallel engine holds: layers, heads, block shapes, and whose copies.

Ranks are numbered stage by stage: rank = pp_rank x tp + tp_rank. Key/value heads are split evenly; with fewer heads
than ranks each head is held by tp / H_kv neighbouring ranks; an MLA latent is the same on every rank of a stage.
Stages are filled as vLLM fills them: equal shares, what is left over goes one each to the stages before the last.
"""

from __future__ import annotations

import msgspec

from rewarm.errors import ConfigError
from rewarm.geometry.dtypes import DType
from rewarm.geometry.model import Layer, LayerKind, Model
from rewarm.geometry.sizes import check_tokens, kv_dtype_of, layer_bytes_per_token, layer_bytes_total, layer_state_bytes

RANKS_MAX = 4096
"""Largest tp and pp taken; more ranks than any deployment known is a slip."""
BLOCK_TOKENS_MAX = 1 << 20
"""Longest block taken, in tokens."""


class BlockShape(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a group of equal layers on one rank. `layers` are indexes in the model; `bytes_per_layer` of one."""

    kind: LayerKind
    layers: tuple[int, ...]
    kv_heads: int
    kv_head_first: int
    key_dim: int
    value_dim: int
    window: int
    block_tokens: int
    bytes_per_layer: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.bytes_per_layer * len(self.layers)


class RankShape(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank holds. `replica_of` is the rank whose blocks have the same bytes and need storing once only."""

    rank: int
    tp_rank: int
    pp_rank: int
    layer_first: int
    layer_count: int
    groups: tuple[BlockShape, ...]
    state_bytes: int
    replica_of: int | None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers that cache tokens, window layers included."""
        return sum(group.block_bytes for group in self.groups)


def rank_shapes(
    model: Model, tp: int = 1, pp: int = 1, *, block_tokens: int = 16, kv_dtype: DType | str | None = None
) -> tuple[RankShape, ...]:
    """The shape of every rank, in rank order. Raises `ConfigError` where heads or layers cannot be divided so."""
    _check_count(block_tokens, "block_tokens", BLOCK_TOKENS_MAX)
    dtype = kv_dtype_of(model, kv_dtype)
    stages = stage_layers(model, pp)
    _check_split(model, tp)
    return tuple(
        _rank_shape(model, stage, pp_rank, tp_rank, tp, block_tokens, dtype)
        for pp_rank, stage in enumerate(stages)
        for tp_rank in range(tp)
    )


def block_bytes(model: Model, block_tokens: int, tp: int = 1, pp: int = 1, kv_dtype: DType | str | None = None) -> int:
    """Bytes of one block on the largest rank: every layer that caches tokens, window layers included."""
    return max(s.block_bytes for s in rank_shapes(model, tp, pp, block_tokens=block_tokens, kv_dtype=kv_dtype))


def bytes_per_rank_token(model: Model, tp: int = 1, pp: int = 1, kv_dtype: DType | str | None = None) -> int:
    """Bytes that one more token adds on the largest rank, replicas included, once every window is full."""
    dtype = kv_dtype_of(model, kv_dtype)
    _check_split(model, tp)
    return max(
        sum(
            layer_bytes_per_token(on_rank(model.layers[i], tp), dtype, model.index_dtype)
            for i in stage
            if model.layers[i].kind is not LayerKind.SLIDING
        )
        for stage in stage_layers(model, pp)
    )


def bytes_per_rank_total(
    model: Model, tokens: int, tp: int = 1, pp: int = 1, kv_dtype: DType | str | None = None
) -> int:
    """Bytes of `tokens` tokens on the largest rank, replicas included."""
    check_tokens(tokens)
    dtype = kv_dtype_of(model, kv_dtype)
    _check_split(model, tp)
    return max(
        sum(layer_bytes_total(on_rank(model.layers[i], tp), tokens, dtype, model) for i in stage)
        for stage in stage_layers(model, pp)
    )


def stage_layers(model: Model, pp: int) -> tuple[range, ...]:
    """Layer indexes of each pipeline stage. Raises `ConfigError` when there are more stages than layers."""
    _check_count(pp, "pp", RANKS_MAX)
    layers = len(model.layers)
    if pp > layers:
        raise ConfigError(f"pp={pp} has more stages than {model.name} has layers ({layers})")
    sizes = [layers // pp] * pp
    for k in range(layers % pp):
        sizes[-2 - k] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def on_rank(layer: Layer, tp: int) -> Layer:
    """The part of a layer that one of `tp` ranks holds; pre-condition: the split was checked."""
    match layer.kind:
        case LayerKind.FULL | LayerKind.SLIDING:
            heads = max(1, layer.kv_heads // tp)
            return msgspec.structs.replace(layer, kv_heads=heads, query_heads=layer.query_heads // tp)
        case LayerKind.MLA:
            return msgspec.structs.replace(layer, query_heads=layer.query_heads // tp)
        case LayerKind.LINEAR:
            return msgspec.structs.replace(
                layer, conv_elements=layer.conv_elements // tp, state_elements=layer.state_elements // tp
            )


def _rank_shape(
    model: Model, stage: range, pp_rank: int, tp_rank: int, tp: int, block_tokens: int, dtype: DType
) -> RankShape:
    groups: dict[Layer, list[int]] = {}
    for index in stage:
        groups.setdefault(model.layers[index], []).append(index)
    shapes = tuple(
        _block_shape(model, layer, tuple(indexes), tp_rank, tp, block_tokens, dtype)
        for layer, indexes in groups.items()
        if layer.kind is not LayerKind.LINEAR
    )
    state = sum(layer_state_bytes(on_rank(model.layers[i], tp), dtype, model.state_dtype) for i in stage)
    token_layers = [layer for layer in groups if layer.kind is not LayerKind.LINEAR]
    original = max((_original(layer, tp_rank, tp) for layer in token_layers), default=tp_rank)
    return RankShape(
        rank=pp_rank * tp + tp_rank,
        tp_rank=tp_rank,
        pp_rank=pp_rank,
        layer_first=stage.start,
        layer_count=len(stage),
        groups=shapes,
        state_bytes=state,
        replica_of=None if original == tp_rank else pp_rank * tp + original,
    )


def _block_shape(
    model: Model, layer: Layer, indexes: tuple[int, ...], tp_rank: int, tp: int, block_tokens: int, dtype: DType
) -> BlockShape:
    part = on_rank(layer, tp)
    mla = layer.kind is LayerKind.MLA
    return BlockShape(
        kind=layer.kind,
        layers=indexes,
        kv_heads=1 if mla else part.kv_heads,
        kv_head_first=0 if mla else tp_rank * layer.kv_heads // tp,
        key_dim=layer.latent_dim + layer.rope_dim if mla else layer.key_dim,
        value_dim=0 if mla else layer.value_dim,
        window=layer.window,
        block_tokens=block_tokens,
        bytes_per_layer=layer_bytes_per_token(part, dtype, model.index_dtype) * block_tokens,
    )


def _original(layer: Layer, tp_rank: int, tp: int) -> int:
    """The first rank of the stage that holds the same bytes of this layer."""
    match layer.kind:
        case LayerKind.MLA:
            return 0
        case _:
            copies = max(1, tp // layer.kv_heads)
            return tp_rank - tp_rank % copies


def _check_split(model: Model, tp: int) -> None:
    _check_count(tp, "tp", RANKS_MAX)
    for layer in set(model.layers):
        if layer.query_heads % tp:
            raise ConfigError(f"tp={tp} does not divide the {layer.query_heads} attention heads of {model.name}")
        if layer.kv_heads and layer.kv_heads % tp and tp % layer.kv_heads:
            raise ConfigError(
                f"the {layer.kv_heads} key/value heads of {model.name} cannot be split or replicated evenly over "
                f"tp={tp} ranks; use a tp that divides them or is a multiple of them"
            )
        if layer.kind is LayerKind.LINEAR and (layer.conv_elements % tp or layer.state_elements % tp):
            raise ConfigError(f"tp={tp} does not divide the recurrent state of {model.name}")


def _check_count(value: int, name: str, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
