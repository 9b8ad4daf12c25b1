"""What the same wave costs without a cache: prefill on a named GPU, by the formula of `geometry`, labelled so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rewarm.bench.result import Percentiles, Recompute
from rewarm.geometry.decode import HBM_BYTES_PER_S, decode_s
from rewarm.geometry.gpus import Gpu, find_gpu
from rewarm.geometry.model import Model
from rewarm.geometry.prefill import DEFAULT_MFU, ModelledPrefill
from rewarm.geometry.sizes import bytes_total
from rewarm.geometry.waves import arrival_order
from rewarm.workload.job import Job

GPU_DEFAULT = "H100"
WEIGHT_BYTES = 2
"""Of a parameter, for the modelled decode: bf16, as the peak rate of the modelled prefill."""


@dataclass(frozen=True)
class Prefiller:
    """Prefill of a job's model on its GPUs: one per tensor-parallel rank unless the job says otherwise."""

    model: Model
    gpu: Gpu
    gpus: int
    formula: ModelledPrefill

    @classmethod
    def of(cls, model: Model, job: Job) -> Prefiller:
        """Build it from a job. Raises `ConfigError` for an unknown GPU."""
        gpu = find_gpu(job.gpu or GPU_DEFAULT)
        gpus = job.gpus or job.tp
        return cls(model, gpu, gpus, ModelledPrefill(gpus=gpus, peak_flops_per_s=gpu.bf16_flops_per_s))

    def seconds(self, tokens: int, cached: int = 0) -> float | None:
        """Seconds of one prefill, bf16 arithmetic; None when the model's active parameters are unknown."""
        if self.model.active_parameters is None:
            return None
        return self.formula.seconds(self.model, tokens, cached)

    def wave(self, concurrency: int, restored_tokens: int, new_tokens: int, restored_bytes: int) -> Recompute | None:
        """A wave of equal requests computed one after another: request k has its first token after k prefills.

        Prefill fills the GPU by itself, so together they would end no sooner. None when it cannot be modelled.
        """
        tokens = restored_tokens + new_tokens
        each_s, rest_s = self.seconds(tokens), self.seconds(new_tokens, restored_tokens)
        if each_s is None or rest_s is None:
            return None
        ends = arrival_order([each_s] * concurrency, 1.0)
        saved_s = each_s - rest_s
        return Recompute(
            ttft_s=percentiles(ends.tolist()),
            tokens_per_s=tokens / each_s,
            break_even_bytes_per_s=restored_bytes / saved_s,
            gpu=self.gpu.name,
            gpus=self.gpus,
            mfu=DEFAULT_MFU,
            source=self.formula.source,
        )

    def tpot_s(self, requests: int, context_tokens: int, kv_dtype: str | None) -> float | None:
        """Seconds per output token while so many requests decode together, weights in 16 bits; None where it cannot
        be modelled."""
        hbm = HBM_BYTES_PER_S.get(self.gpu.name)
        if hbm is None or self.model.active_parameters is None:
            return None
        weight_bytes = self.model.active_parameters * WEIGHT_BYTES
        context_bytes = bytes_total(self.model, context_tokens, kv_dtype)
        return decode_s(weight_bytes, context_bytes, requests, self.gpus, hbm)


def percentiles(values: list[float]) -> Percentiles:
    """Nearest-rank percentiles; what is infinite (it never came) becomes null."""
    ranked = np.percentile(np.array(values), [50, 90, 99], method="inverted_cdf").tolist()
    return Percentiles(*(None if math.isinf(value) else value for value in ranked))
