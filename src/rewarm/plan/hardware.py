"""What is assumed where a plan does not say: link efficiencies, memory bandwidths, prices. Each dated and sourced.

Prices move: every default is shown as assumed, with its source, and a plan's own `[prices]` replace it.
"""

from __future__ import annotations

LINK_EFFICIENCY = {"pcie": 1.0, "nvme-rdma": 0.9, "nvme-tcp": 0.8, "nfs": 0.7}
"""Share of a link's rate that reads reach. RDMA: published RoCE readings of 10.5 to 11.5 GB/s on 100 Gb/s; TCP and NFS:
round figures of ours, to be measured with `rewarm probe`."""
DEFAULT_LINK_EFFICIENCY = 0.9

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

GPU_HOUR_USD = 2.35
GPU_HOUR_SOURCE = "H100, one year reserved, SemiAnalysis rental index, March 2026; other GPUs differ"
FLASH_USD_PER_TB = 330.0
FLASH_SOURCE = "30 TB enterprise TLC drives at 9,000 to 11,000 USD, press reports of the first quarter of 2026"
DRAM_USD_PER_GB = 15.0
DRAM_SOURCE = "round figure for registered DDR5 in 2026"
