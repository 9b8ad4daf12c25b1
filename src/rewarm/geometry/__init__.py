"""How many bytes a token is, what each rank holds, what a namespace stands for, how long prefill and a wave take.

Pure arithmetic over a `Model` that comes from a Hugging Face `config.json` or a bundled preset. It opens no medium
and knows no engine; an architecture that it does not understand is refused by name.
"""

from rewarm.geometry.architectures import supported_architectures
from rewarm.geometry.dtypes import DType, parse_dtype
from rewarm.geometry.fingerprint import commit_of, weights_fingerprint
from rewarm.geometry.gpus import GPUS, Gpu, find_gpu
from rewarm.geometry.model import Layer, LayerKind, Model
from rewarm.geometry.namespace import Namespace, directory_namespace, model_namespace
from rewarm.geometry.parallel import (
    BlockShape,
    RankShape,
    block_bytes,
    bytes_per_rank_token,
    bytes_per_rank_total,
    rank_shapes,
)
from rewarm.geometry.prefill import (
    MeasuredPrefill,
    Meeting,
    ModelledPrefill,
    Prefill,
    break_even_bandwidth,
    meeting_point,
    prefill_flops,
    prefill_s,
)
from rewarm.geometry.presets import load_model, preset_names
from rewarm.geometry.sizes import (
    bytes_per_token,
    bytes_total,
    layer_bytes_per_token,
    layer_state_bytes,
    state_bytes,
)
from rewarm.geometry.waves import (
    all_at_once,
    arrival_order,
    closed_loop_requests_per_s,
    concurrency_of,
    knee_concurrency,
    load_of,
    open_loop_mean_s,
    requests_per_s_of,
    shortest_first,
)

__all__ = [
    "GPUS",
    "BlockShape",
    "DType",
    "Gpu",
    "Layer",
    "LayerKind",
    "MeasuredPrefill",
    "Meeting",
    "Model",
    "ModelledPrefill",
    "Namespace",
    "Prefill",
    "RankShape",
    "all_at_once",
    "arrival_order",
    "block_bytes",
    "break_even_bandwidth",
    "bytes_per_rank_token",
    "bytes_per_rank_total",
    "bytes_per_token",
    "bytes_total",
    "closed_loop_requests_per_s",
    "commit_of",
    "concurrency_of",
    "directory_namespace",
    "find_gpu",
    "knee_concurrency",
    "layer_bytes_per_token",
    "layer_state_bytes",
    "load_model",
    "load_of",
    "meeting_point",
    "model_namespace",
    "open_loop_mean_s",
    "parse_dtype",
    "prefill_flops",
    "prefill_s",
    "preset_names",
    "rank_shapes",
    "requests_per_s_of",
    "shortest_first",
    "state_bytes",
    "supported_architectures",
    "weights_fingerprint",
]
