"""The cache of a model as blocks: which layers it has, and how the KV of some tokens lies in the bytes of a block.

A block holds `block_tokens` tokens of one row: of every layer its keys, then its values, each in the order heads,
tokens, elements. Layers with a sliding window are blocks of their own ("window"): all of their tokens are kept, and a
restore reads only those that the window still sees, so a prefix may end anywhere. Layers that keep a state instead of
tokens are refused by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.buffers import aligned_region

torch: Any = importlib.import_module("torch")
_caches: Any = importlib.import_module("transformers.cache_utils")


class Layer(msgspec.Struct, frozen=True, eq=False):
    """One layer of the cache; `heads`, `key_width` and `value_width` are those of its tensors."""

    index: int
    window: int
    """Tokens that a new one may see beside itself; 0: all."""
    heads: int
    key_width: int
    value_width: int
    dtype: Any
    device: Any

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return self.heads * (self.key_width + self.value_width) * int(self.dtype.itemsize)

    def widths(self) -> tuple[tuple[str, int], ...]:
        """What is kept of it, in order."""
        return ("keys", self.key_width), ("values", self.value_width)


class Group(msgspec.Struct, frozen=True, eq=False):
    """Layers whose blocks are kept and restored together. `suffix` goes to the keys of its blocks."""

    suffix: bytes
    layers: list[Layer]
    window: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_tokens * sum(layer.token_bytes for layer in self.layers)

    def first(self, tokens: int) -> int:
        """The first block that a prefix of so many tokens needs."""
        return max(0, tokens - self.window) // self.block_tokens if self.window else 0

    def region(self, blocks: int) -> Any:
        """Memory for blocks, a tensor of bytes of shape (blocks, block_bytes) that starts on a page."""
        return torch.from_numpy(aligned_region(blocks * self.block_bytes).reshape(blocks, self.block_bytes))

    def pieces(self, region: Any) -> list[tuple[Layer, str, Any]]:
        """(layer, "keys" or "values", its part of a region as a tensor of shape (heads, blocks, tokens, elements))."""
        found, at = [], 0
        for layer in self.layers:
            for name, width in layer.widths():
                size = layer.heads * self.block_tokens * width * layer.dtype.itemsize
                part = region[:, at : at + size].view(layer.dtype)
                shape = (len(region), layer.heads, self.block_tokens, width)
                found.append((layer, name, part.view(shape).permute(1, 0, 2, 3)))
                at += size
        return found


def new_cache(model: Any) -> Any:
    """An empty cache of a model. Layers with a window record all of their tokens, so that they can be kept."""
    cache = _caches.DynamicCache(config=model.config)
    if any(cache.is_sliding):
        cache.activate_past_recording()
    return cache


def groups_of(model: Any, block_tokens: int) -> list[Group]:
    """The groups of a model, found by running two tokens through it. Raises `ConfigError` for what it cannot keep."""
    probe, other = (_probe(model, [0, second]) for second in (0, 1))
    layers = [_layer(index, layer, type(model).__name__) for index, layer in enumerate(probe.layers)]
    for one, two in zip(probe.layers, other.layers, strict=True):
        first = one.keys[:, :, :1].float(), two.keys[:, :, :1].float()
        if not torch.allclose(*first, rtol=0.05, atol=0.05 * float(first[0].abs().max())):
            raise ConfigError(f"{type(model).__name__} lets a token see later ones: a prefix has no KV of its own")
    full = [layer for layer in layers if not layer.window]
    sliding = [layer for layer in layers if layer.window]
    groups = [(b"f", full, 0), (b"w", sliding, max((layer.window for layer in sliding), default=0))]
    return [Group(suffix, chosen, window, block_tokens) for suffix, chosen, window in groups if chosen]


def describe(groups: Sequence[Group]) -> dict[str, Any]:
    """The shape of the blocks as JSON values."""
    return {
        "dtype": str(groups[0].layers[0].dtype).removeprefix("torch."),
        "groups": [[[*msgspec.structs.astuple(x)[:5], str(x.dtype)] for x in group.layers] for group in groups],
    }


def pack(group: Group, cache: Any, row: int, start: int, region: Any) -> None:
    """Copy the tokens of one row that begin at column `start` into a region, as many as it holds."""
    for layer, name, piece in group.pieces(region):
        tensor = getattr(cache.layers[layer.index], name)
        at = start - (cache.get_seq_length() - tensor.shape[2])
        tokens = tensor[row, :, at : at + len(region) * group.block_tokens]
        piece.copy_(tokens.detach().unflatten(1, (len(region), group.block_tokens)))


def kept_from(group: Group, cache: Any) -> int:
    """The first column whose KV every layer of a cache still has. Raises `MisuseError` for another model's cache."""
    first = 0
    for layer in group.layers:
        found = cache.layers[layer.index] if layer.index < len(cache.layers) else None
        keys = getattr(found, "keys", None)
        if keys is None or (keys.shape[1], keys.shape[3], keys.dtype) != (layer.heads, layer.key_width, layer.dtype):
            raise MisuseError(f"layer {layer.index} of the cache is not that of the model: it was made by another one")
        first = max(first, cache.get_seq_length() - keys.shape[2])
    return first


def fill(group: Group, cache: Any, regions: Sequence[Any], tokens: Sequence[int], columns: int) -> None:
    """Put restored blocks into an empty cache, so that it holds `columns` columns.

    Row i has `tokens[i]` tokens of its own; its region holds the blocks from `first(tokens[i])` on. Columns before
    them are padding that the attention mask hides: zeros.
    """
    pieces = [group.pieces(region) for region in regions]
    for number in range(2 * len(group.layers)):
        layer, name, _ = pieces[0][number]
        wide = min(columns, layer.window) if layer.window else columns
        rows = []
        for of_row, count in zip(pieces, tokens, strict=True):
            held = of_row[number][2].flatten(1, 2)
            own = held[:, : count - group.first(count) * group.block_tokens][:, -wide:] if count else held[:, :0]
            missing = wide - own.shape[1]
            rows.append(torch.nn.functional.pad(own, (0, 0, missing, 0)) if missing else own)
        whole = torch.stack(rows) if len(rows) > 1 else rows[0][None]
        _set(cache.layers[layer.index], name, whole.to(layer.device), columns)


def _set(layer: Any, name: str, tensor: Any, columns: int) -> None:
    if not layer.is_initialized:
        layer.lazy_initialization(tensor, tensor)
    setattr(layer, name, tensor)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = columns


def _probe(model: Any, ids: list[int]) -> Any:
    """The cache of a model after these tokens."""
    cache = new_cache(model)
    with torch.no_grad():
        model(torch.tensor([ids], device=model.device), past_key_values=cache, use_cache=True)
    return cache


def check_kind(index: int, layer: Any, model: str) -> None:
    """Raise `ConfigError` for a layer that keeps more than tokens, or something else: exact types only."""
    if type(layer) not in (_caches.DynamicLayer, _caches.DynamicSlidingWindowLayer):
        raise ConfigError(
            f"layer {index} of {model} is a {type(layer).__name__}, which keeps no plain KV of tokens: not supported; "
            "supported are layers of full and of sliding-window attention"
        )


def _layer(index: int, layer: Any, model: str) -> Layer:
    """What a layer holds after a probe."""
    check_kind(index, layer, model)
    if layer.get_seq_length() != 2 or layer.keys.shape[:1] != (1,):
        raise ConfigError(f"layer {index} of {model} does not use the cache that it is given: not supported")
    window = layer.sliding_window - 1 if layer.is_sliding else 0
    heads, _, key_width = layer.keys.shape[1:]
    return Layer(index, window, heads, key_width, layer.values.shape[3], layer.keys.dtype, layer.keys.device)
