"""What a request costs on this model and engine: bytes to restore, seconds to prefill, seconds per output token.

Arrays in, arrays out: the formulas are `geometry`'s, evaluated once per distinct kind of layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from rewarm.errors import ConfigError
from rewarm.geometry import (
    LayerKind,
    MeasuredPrefill,
    Model,
    ModelledPrefill,
    Prefill,
    bytes_per_rank_token,
    bytes_per_token,
    bytes_total,
    prefill_flops,
)
from rewarm.geometry.decode import HBM_BYTES_PER_S, decode_s
from rewarm.geometry.gpus import find_gpu
from rewarm.plan.spec import Engine, PlanSpec


@dataclass(frozen=True)
class Costs:
    """One model on one engine instance. `prefill_source` and `tpot_source` are `measured` or `modelled`."""

    model: Model
    kv_dtype: str | None
    prefill: Prefill
    tpot: tuple[tuple[int, float], ...]
    """(concurrency, seconds per output token), ascending."""
    tpot_source: str
    parts: tuple[tuple[Model, int], ...]
    """The model's distinct layers, each as a model of one layer without weights, and how often it occurs."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds, all ranks together, each head once."""
        return bytes_per_token(self.model, self.kv_dtype)

    def bytes_of(self, tokens: NDArray[np.int64] | Sequence[int]) -> NDArray[np.float64]:
        """Bytes to restore for each number of leading tokens."""
        values = np.asarray(tokens, dtype=np.int64)
        total = np.zeros(len(values))
        for part, count in self.parts:
            if part.layers[0].kind is LayerKind.SLIDING:
                total += count * self._window_bytes(part, values)
                continue
            first, second = (bytes_total(part, n, self.kv_dtype) for n in (1, 2))
            total += count * np.where(values > 0, first + (values - 1.0) * (second - first), 0.0)
        return total

    def _window_bytes(self, part: Model, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        return _each(tokens[:, None], lambda row: bytes_total(part, row[0], self.kv_dtype))

    def prefill_s(
        self, tokens: NDArray[np.int64] | Sequence[int], cached: NDArray[np.int64] | Sequence[int]
    ) -> NDArray[np.float64]:
        """Seconds to compute each number of new tokens after each number of cached ones."""
        new, old = np.asarray(tokens, dtype=np.int64), np.asarray(cached, dtype=np.int64)
        if isinstance(self.prefill, MeasuredPrefill):
            return np.where(new > 0, new / self.prefill.tokens_per_s + self.prefill.fixed_s, 0.0)
        prefill = self.prefill
        if not isinstance(prefill, ModelledPrefill):
            raise TypeError(f"prefill of another kind: {prefill!r}")
        flops = 2.0 * (self.model.active_parameters or 0) * new
        for part, count in self.parts:
            flops = flops + count * _attention_flops(part, new, old)
        seconds = flops / (prefill.gpus * prefill.peak_flops_per_s * prefill.mfu) + prefill.fixed_s
        return np.where(new > 0, seconds, 0.0)

    def tpot_s(self, concurrency: float) -> float:
        """Seconds per output token with that many requests decoding at once.

        Straight lines between the points; constant below the first, the last line goes on above the last.
        """
        points = self.tpot
        if concurrency <= points[0][0] or len(points) == 1:
            return points[0][1]
        above = next((i for i in range(1, len(points)) if points[i][0] >= concurrency), len(points) - 1)
        (x0, y0), (x1, y1) = points[above - 1], points[above]
        return max(y0 + (y1 - y0) * (concurrency - x0) / (x1 - x0), min(y0, y1))


def costs_of(spec: PlanSpec, model: Model, context_tokens: int) -> Costs:
    """The costs of a plan. `context_tokens` is a typical length, for the modelled TPOT.

    Raises `ConfigError` naming the field: a TP that the heads do not allow, a GPU that is not known, a model whose
    parameters are not known and no measured rate.
    """
    try:
        bytes_per_rank_token(model, spec.fleet.tp, 1, spec.kv_dtype)
    except ConfigError as error:
        raise ConfigError(f"fleet.tp: {error}") from error
    prefill = _prefill(spec.engine, _gpus(spec), model)
    points, source = _tpot(spec, model, context_tokens)
    kinds = Counter(model.layers).items()
    parts = tuple((msgspec.structs.replace(model, layers=(layer,), active_parameters=0), n) for layer, n in kinds)
    return Costs(model, spec.kv_dtype, prefill, points, source, parts)


def _gpus(spec: PlanSpec) -> int:
    return spec.engine.gpus or spec.fleet.tp


def _prefill(engine: Engine, gpus: int, model: Model) -> Prefill:
    if engine.prefill_tokens_per_s is not None:
        return MeasuredPrefill(tokens_per_s=engine.prefill_tokens_per_s)
    if model.active_parameters is None:
        raise ConfigError(
            f"engine.prefill_tokens_per_s is missing: the active parameters of {model.name} are unknown, so prefill "
            "cannot be modelled; give a measured rate"
        )
    peak = engine.peak_flops if engine.peak_flops is not None else find_gpu(str(engine.gpu)).bf16_flops_per_s
    return ModelledPrefill(gpus=gpus, peak_flops_per_s=peak, mfu=engine.mfu)


TPOT_POINTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def _tpot(spec: PlanSpec, model: Model, context_tokens: int) -> tuple[tuple[tuple[int, float], ...], str]:
    """Measured points, or memory traffic as `geometry.decode` has it."""
    engine = spec.engine
    if engine.tpot is not None:
        return tuple(sorted((int(name), seconds) for name, seconds in engine.tpot.items())), "measured"
    hbm = engine.hbm_read or HBM_BYTES_PER_S.get(find_gpu(engine.gpu).name if engine.gpu else "")
    if hbm is None or model.active_parameters is None:
        raise ConfigError(
            "engine.tpot is missing: give seconds per output token by concurrency, or engine.gpu or engine.hbm_read "
            "for a model whose active parameters are known"
        )
    weights = model.active_parameters * engine.weight_bits / 8
    each = bytes_total(model, context_tokens, spec.kv_dtype)
    return tuple((n, decode_s(weights, each, n, _gpus(spec), hbm)) for n in TPOT_POINTS), "modelled"


def _attention_flops(part: Model, new: NDArray[np.int64], cached: NDArray[np.int64]) -> NDArray[np.float64]:
    """Attention of one layer. It is proportional to the pairs of tokens, except with a window or a sparse indexer."""
    layer = part.layers[0]
    if layer.kind is LayerKind.SLIDING or layer.index_dim:
        return _each(np.stack([new, cached], axis=-1), lambda row: prefill_flops(part, row[0], row[1]))
    per_pair = prefill_flops(part, 2) / 2
    return np.asarray(per_pair * (cached * new + new * new / 2))


def _each(rows: NDArray[np.int64], function: Callable[[tuple[int, ...]], float]) -> NDArray[np.float64]:
    """`function` of every row, called once for each different row."""
    unique, inverse = np.unique(rows, axis=0, return_inverse=True)
    results = np.array([function(tuple(row)) for row in unique.tolist()], dtype=np.float64)
    return np.asarray(results[inverse.reshape(-1)])
