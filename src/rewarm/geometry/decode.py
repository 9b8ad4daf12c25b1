"""How long a token takes once the context is there: memory traffic over memory bandwidth, a closed formula."""

from __future__ import annotations

HBM_BYTES_PER_S = {
    "A100": 2.039e12,
    "A800": 2.039e12,
    "L4": 0.3e12,
    "L40S": 0.864e12,
    "H20": 4.0e12,
    "H100": 3.35e12,
    "H100-PCIe": 2.0e12,
    "H800": 3.35e12,
    "H200": 4.8e12,
    "B200": 8.0e12,
    "GB200": 8.0e12,
    "MI300X": 5.3e12,
    "MI325X": 6.0e12,
    "MI355X": 8.0e12,
}
"""Memory bandwidth of one GPU, bytes/s, from the vendors' data sheets (A100 and A800: 80 GB SXM)."""
DECODE_BANDWIDTH_SHARE = 0.6
"""Share of it that decode reaches; a round figure for engines with CUDA graphs, replaced by a measured TPOT."""


def decode_s(weight_bytes: float, context_bytes: float, concurrency: int, gpus: int, hbm_bytes_per_s: float) -> float:
    """Seconds per output token: TPOT(N) = (P_active w + N KV(n)) / (gpus x HBM x 0.6).

    Each step reads all active weights once and the KV of every request. A mixture of experts reads more weights as N
    grows; the formula keeps the active ones and is then a lower bound. Source: the roofline of a memory-bound kernel.
    """
    return (weight_bytes + concurrency * context_bytes) / (gpus * hbm_bytes_per_s * DECODE_BANDWIDTH_SHARE)
