"""Element types of a KV cache: their names, the spellings engines use for them, and their width in bytes.

Scales of quantised caches are not counted: an engine that keeps a scale per token or per block stores a little more
than the figures here.
"""

from __future__ import annotations

import difflib
import enum

from rewarm.errors import ConfigError


class DType(enum.StrEnum):
    """Element type of cached keys and values. `FP8` is e4m3, the meaning of "fp8" in vLLM and SGLang."""

    FP8 = "fp8"
    FP8_E5M2 = "fp8_e5m2"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return _WIDTH[self]


_WIDTH = {DType.FP8: 1, DType.FP8_E5M2: 1, DType.BF16: 2, DType.FP16: 2, DType.FP32: 4}

_ALIASES = {
    "fp8": DType.FP8,
    "fp8_e4m3": DType.FP8,
    "fp8_e4m3fn": DType.FP8,
    "fp8_e4m3fnuz": DType.FP8,
    "float8_e4m3": DType.FP8,
    "float8_e4m3fn": DType.FP8,
    "float8_e4m3fnuz": DType.FP8,
    "f8_e4m3": DType.FP8,
    "e4m3": DType.FP8,
    "fp8_e5m2": DType.FP8_E5M2,
    "float8_e5m2": DType.FP8_E5M2,
    "f8_e5m2": DType.FP8_E5M2,
    "e5m2": DType.FP8_E5M2,
    "bf16": DType.BF16,
    "bfloat16": DType.BF16,
    "fp16": DType.FP16,
    "float16": DType.FP16,
    "f16": DType.FP16,
    "half": DType.FP16,
    "fp32": DType.FP32,
    "float32": DType.FP32,
    "f32": DType.FP32,
    "float": DType.FP32,
}


def parse_dtype(name: DType | str) -> DType:
    """The element type called `name` ("bf16", "torch.bfloat16", "fp8_e4m3", ...). Raises `ConfigError`."""
    if isinstance(name, DType):
        return name
    plain = name.strip().lower().replace("-", "_").removeprefix("torch.") if isinstance(name, str) else name
    if plain in _ALIASES:
        return _ALIASES[plain]
    near = difflib.get_close_matches(str(plain), _ALIASES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"unknown KV cache dtype {name!r}; {hint}one of {', '.join(DType)}")
