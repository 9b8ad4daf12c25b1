"""What is assumed where a plan does not say: link efficiencies, prices. Each dated and sourced.

Prices move: every default is shown as assumed, with its source, and a plan's own `[prices]` replace it.
"""

from __future__ import annotations

LINK_EFFICIENCY = {"pcie": 1.0, "nvme-rdma": 0.9, "nvme-tcp": 0.8, "nfs": 0.7}
"""Share of a link's rate that reads reach. RDMA: published RoCE readings of 10.5 to 11.5 GB/s on 100 Gb/s; TCP and NFS:
round figures of ours, to be measured with `rewarm probe`."""
DEFAULT_LINK_EFFICIENCY = 0.9

GPU_HOUR_USD = 2.35
GPU_HOUR_SOURCE = "H100, one year reserved, SemiAnalysis rental index, March 2026; other GPUs differ"
FLASH_USD_PER_TB = 330.0
FLASH_SOURCE = "30 TB enterprise TLC drives at 9,000 to 11,000 USD, press reports of the first quarter of 2026"
DRAM_USD_PER_GB = 15.0
DRAM_SOURCE = "round figure for registered DDR5 in 2026"
