"""Published peak rates of GPUs for the prefill formula: dense ones, where vendors like to print those with sparsity.

As the vendors publish them, recorded in November 2026 and not read again from the sheets: check the one you buy by. A
GPU whose vendor publishes no rate is not here: give a measured prefill rate instead, which is better anyway.
"""

from __future__ import annotations

import difflib

import msgspec

from rewarm.errors import ConfigError


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: dense matrix FLOP/s in bf16 (fp16 is the same) and fp8 (None where it has none), and who says so."""

    name: str
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None
    source: str


GPUS: tuple[Gpu, ...] = (
    Gpu(name="A100", bf16_flops_per_s=312e12, fp8_flops_per_s=None, source="NVIDIA A100 data sheet"),
    Gpu(name="A800", bf16_flops_per_s=312e12, fp8_flops_per_s=None, source="NVIDIA A800 data sheet"),
    Gpu(name="L4", bf16_flops_per_s=121e12, fp8_flops_per_s=242.5e12, source="NVIDIA L4 data sheet, half of sparse"),
    Gpu(name="L40S", bf16_flops_per_s=362.05e12, fp8_flops_per_s=733e12, source="NVIDIA L40S data sheet"),
    Gpu(name="H20", bf16_flops_per_s=148e12, fp8_flops_per_s=296e12, source="NVIDIA H20 data sheet"),
    Gpu(name="H100", bf16_flops_per_s=989e12, fp8_flops_per_s=1979e12, source="NVIDIA H100 data sheet, SXM"),
    Gpu(name="H100-PCIe", bf16_flops_per_s=756e12, fp8_flops_per_s=1513e12, source="NVIDIA H100 data sheet, PCIe"),
    Gpu(name="H800", bf16_flops_per_s=989e12, fp8_flops_per_s=1979e12, source="NVIDIA H800 data sheet, SXM"),
    Gpu(name="H200", bf16_flops_per_s=989e12, fp8_flops_per_s=1979e12, source="NVIDIA H200 data sheet, SXM"),
    Gpu(name="B200", bf16_flops_per_s=2250e12, fp8_flops_per_s=4500e12, source="NVIDIA HGX B200 data sheet, 1000 W"),
    Gpu(name="GB200", bf16_flops_per_s=2500e12, fp8_flops_per_s=5000e12, source="NVIDIA GB200 NVL72 data sheet"),
    Gpu(name="MI300X", bf16_flops_per_s=1307.4e12, fp8_flops_per_s=2614.9e12, source="AMD Instinct MI300X data sheet"),
    Gpu(name="MI325X", bf16_flops_per_s=1307.4e12, fp8_flops_per_s=2614.9e12, source="AMD Instinct MI325X data sheet"),
    Gpu(name="MI355X", bf16_flops_per_s=2516.6e12, fp8_flops_per_s=5033.2e12, source="AMD Instinct MI355X data sheet"),
)

_ALIASES = {"h100-sxm": "h100", "h800-sxm": "h800", "h200-sxm": "h200", "a100-sxm": "a100", "a100-80gb": "a100"}
_UNPUBLISHED = frozenset({"mi308x"})


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`, any case, blanks as dashes. Raises `ConfigError` with the choices and the nearest name."""
    plain = "-".join(name.lower().split())
    plain = _ALIASES.get(plain, plain)
    known = {gpu.name.lower(): gpu for gpu in GPUS}
    if plain in known:
        return known[plain]
    choices = ", ".join(gpu.name for gpu in GPUS)
    advice = f"give its peak FLOP/s or a measured prefill rate, or one of {choices}"
    if plain in _UNPUBLISHED:
        raise ConfigError(f"the vendor of {name} publishes no peak FLOP/s for it; {advice}")
    near = difflib.get_close_matches(plain, known, n=1)
    hint = f"did you mean {known[near[0]].name!r}? " if near else ""
    raise ConfigError(f"unknown GPU {name!r}; {hint}{advice}")
