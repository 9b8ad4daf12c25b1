"""How long a GPU takes to compute a context anew, and from which bandwidth on loading it is faster. Closed formulas.

A measured prefill rate (`MeasuredPrefill`) always replaces the formula (`ModelledPrefill`), and whoever shows a time
says which of the two it came from (`source`). Peak rates of known GPUs are in `gpus.py`.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from rewarm.errors import ConfigError
from rewarm.geometry.dtypes import DType
from rewarm.geometry.model import Layer, LayerKind, Model
from rewarm.geometry.sizes import bytes_total, check_tokens

DEFAULT_MFU = 0.5
"""Model FLOP/s utilisation of a long prefill: 70B, 128K tokens, 4 x H100 in about 20 s gives 0.50."""


class Prefill(Protocol):
    """Says how long `tokens` new tokens take after `cached` ones that are already there."""

    @property
    def source(self) -> str:
        """`measured` or `modelled`."""

    def seconds(self, model: Model, tokens: int, cached: int = 0) -> float:
        """Seconds of prefill; 0.0 for no tokens."""


class ModelledPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """T_pre(m | p) = FLOPs(m | p) / (gpus x peak x mfu) + fixed_s. Peak in FLOP/s of one GPU, dense."""

    gpus: int
    peak_flops_per_s: float
    mfu: float = DEFAULT_MFU
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError(f"gpus must be at least 1, got {self.gpus}")
        _check_positive(self.peak_flops_per_s, "peak_flops_per_s")
        if not 0 < self.mfu <= 1:
            raise ConfigError(f"mfu must be above 0 and at most 1, got {self.mfu}")
        _check_not_negative(self.fixed_s, "fixed_s")

    @property
    def source(self) -> str:
        """`modelled`."""
        return "modelled"

    def seconds(self, model: Model, tokens: int, cached: int = 0) -> float:
        """Seconds to compute `tokens` after `cached`. Raises `ConfigError` without known active parameters."""
        flops = prefill_flops(model, tokens, cached)
        return flops / (self.gpus * self.peak_flops_per_s * self.mfu) + self.fixed_s if tokens else 0.0


class MeasuredPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """T_pre(m | p) = m / tokens_per_s + fixed_s, from a rate measured on a server at about the length asked for."""

    tokens_per_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        _check_positive(self.tokens_per_s, "tokens_per_s")
        _check_not_negative(self.fixed_s, "fixed_s")

    @property
    def source(self) -> str:
        """`measured`."""
        return "measured"

    def seconds(self, model: Model, tokens: int, cached: int = 0) -> float:
        """Seconds to compute `tokens`; `cached` tokens do not change a measured rate."""
        check_tokens(tokens)
        return tokens / self.tokens_per_s + self.fixed_s if tokens else 0.0


def prefill_flops(model: Model, tokens: int, cached: int = 0) -> float:
    """Floating-point operations to compute m = `tokens` new tokens after p = `cached` ones, n = p + m.

    2 P_active m + sum over layers of 2 H_q (d_k + d_v) pairs, where pairs = p m + m^2/2 for a layer that sees
    everything (4 L H_q d_h (p m + m^2/2) when d_k = d_v = d_h) and at most m min(W, n) for a window layer. MLA counts
    d_qk and d_v; a sparse indexer see `_indexed_flops`; the state updates of linear layers (a few per cent) are not
    counted. Source: Kaplan et al. 2020 (2 P per token) and the attention products of Vaswani et al. 2017, causal half.
    Raises `ConfigError` when the model's active parameters are unknown.
    """
    check_tokens(tokens)
    check_tokens(cached, "cached")
    if model.active_parameters is None:
        raise ConfigError(
            f"the active parameters of {model.name} are unknown, so prefill cannot be modelled; give a measured "
            f"prefill rate, or set active_parameters"
        )
    attention = sum(_attention_flops(layer, tokens, cached) for layer in model.layers)
    return 2.0 * model.active_parameters * tokens + attention


def prefill_s(model: Model, tokens: int, cached: int, prefill: Prefill) -> float:
    """Seconds to compute `tokens` new tokens after `cached` ones."""
    return prefill.seconds(model, tokens, cached)


def break_even_bandwidth(
    model: Model, tokens: int, prefill: Prefill, *, floor_s: float = 0.0, kv_dtype: DType | str | None = None
) -> float:
    """Bytes/s above which loading `tokens` tokens beats computing them: B* = KV(p) / (T_pre(p) - floor_s).

    `floor_s` is the fixed time of a restore. `inf` when computing is no slower than that alone.
    """
    if tokens < 1:
        raise ConfigError(f"tokens must be at least 1 for a break-even bandwidth, got {tokens}")
    _check_not_negative(floor_s, "floor_s")
    left = prefill.seconds(model, tokens) - floor_s
    return bytes_total(model, tokens, kv_dtype) / left if left > 0 else math.inf


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where computing from the front meets loading from the back, and when, in seconds."""

    computed_tokens: int
    loaded_tokens: int
    seconds: float


def meeting_point(
    model: Model,
    tokens: int,
    bandwidth_bytes_per_s: float,
    prefill: Prefill,
    *,
    floor_s: float = 0.0,
    kv_dtype: DType | str | None = None,
) -> Meeting:
    """Compute x leading tokens while loading the rest: the x that ends first, T_pre(x) = KV(p - x) / B + floor_s.

    Found by bisection over whole tokens, because both sides are monotonic; about 1 / (1/T_compute + 1/T_load) in all.
    With window layers KV(p - x) is what the last p - x tokens need.
    """
    check_tokens(tokens)
    _check_positive(bandwidth_bytes_per_s, "bandwidth_bytes_per_s")
    _check_not_negative(floor_s, "floor_s")

    def compute_s(x: int) -> float:
        return prefill.seconds(model, x)

    def load_s(x: int) -> float:
        return bytes_total(model, tokens - x, kv_dtype) / bandwidth_bytes_per_s + floor_s if x < tokens else 0.0

    low, high = 0, tokens
    while low < high:
        middle = (low + high) // 2
        if compute_s(middle) >= load_s(middle):
            high = middle
        else:
            low = middle + 1
    best = min({max(low - 1, 0), low}, key=lambda x: (max(compute_s(x), load_s(x)), x))
    return Meeting(computed_tokens=best, loaded_tokens=tokens - best, seconds=max(compute_s(best), load_s(best)))


def _attention_flops(layer: Layer, tokens: int, cached: int) -> float:
    pairs = cached * tokens + tokens * tokens / 2
    per_pair = 2.0 * layer.query_heads * (layer.key_dim + layer.value_dim)
    match layer.kind:
        case LayerKind.FULL:
            return per_pair * pairs
        case LayerKind.SLIDING:
            # m min(W, n) counts a window that is not full yet as full; the causal half bounds it there.
            return per_pair * min(pairs, tokens * min(layer.window, cached + tokens))
        case LayerKind.MLA:
            return _indexed_flops(layer, tokens, cached, pairs) if layer.index_dim else per_pair * pairs
        case LayerKind.LINEAR:
            return 0.0


def _indexed_flops(layer: Layer, tokens: int, cached: int, pairs: float) -> float:
    """Sparse attention: the indexer scores all pairs, 2 H_idx d_idx each, then either all pairs are computed with the
    expanded heads or the top k with the latent, 2 H_q (2 r_kv + d_rope) each, whichever is less (DeepSeek-V3.2 report).
    """
    scores = 2.0 * layer.index_heads * layer.index_dim * pairs
    dense = 2.0 * layer.query_heads * (layer.key_dim + layer.value_dim) * pairs
    chosen = min(pairs, tokens * min(layer.index_topk, cached + tokens))
    sparse = 2.0 * layer.query_heads * (2 * layer.latent_dim + layer.rope_dim) * chosen
    return scores + min(dense, sparse)


def _check_positive(value: float, name: str) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")


def _check_not_negative(value: float, name: str) -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be zero or a positive number, got {value!r}")
