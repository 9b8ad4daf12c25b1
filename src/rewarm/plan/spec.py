"""What a plan is made from: model, engine, media, fleet, workload, prices, objective. Data only; `parsing` reads it.

Rates are bytes/s, sizes bytes, times seconds, money US dollars, tokens whole numbers. `medium.probe` and
`workload.trace` are names of files that the caller resolves: the planner opens none.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Order = Literal["shortest", "arrival", "together"]
"""Restore order: shortest remaining first, one after another as they came, or all at once."""


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The server that computes: one instance of it."""

    gpus: int | None = None
    """GPUs of one instance; `fleet.tp` without it."""
    gpu: str | None = None
    """A GPU whose published peak is known; or `peak_flops`; or a measured `prefill_tokens_per_s`."""
    peak_flops: float | None = None
    """Dense FLOP/s of one GPU at the precision that prefill runs in."""
    mfu: float = 0.5
    prefill_tokens_per_s: float | None = None
    """Measured at about the length of the workload; replaces the formula."""
    tpot: dict[str, float] | None = None
    """Seconds per output token by concurrency, measured; without it modelled from memory bandwidth."""
    hbm_read: float | None = None
    weight_bits: float = 8.0
    fixed_time: float = 0.0
    """Seconds that every restore takes beside the transfer."""
    client_time: float = 0.0
    """Seconds that a benchmark's client adds to a wave's wall time."""
    max_sequences: int = 256
    """Requests that one instance holds at once; more wait."""


class Medium(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One place to restore from: drives in every node, or an array that all nodes share."""

    name: str
    shared: bool = False
    drives: int = 1
    drive_read: float | None = None
    drive_write: float | None = None
    raid_efficiency: float = 1.0
    protocol: str | None = None
    """`pcie`, `nvme-rdma`, `nvme-tcp` or `nfs`: sets `link_efficiency` where that is not given."""
    ports: int = 1
    link: float | None = None
    """Bytes/s of one port of the array; the nodes that restore at the same moment share all ports."""
    link_efficiency: float | None = None
    node_link: float | None = None
    """Bytes/s of the port of one node; that of the array without it."""
    host_copy: float | None = None
    reader: float | None = None
    """Bytes/s that the reading software reaches on any medium."""
    effective_read: float | None = None
    """Measured end to end; replaces the arithmetic (for a shared medium: of the whole array)."""
    fixed_time: float | None = None
    probe: str | None = None
    capacity: float | None = None
    """Bytes of one drive."""
    dwpd: float | None = None
    """Rated drive writes per day."""
    drive_price: float | None = None
    extra_price: float = 0.0
    """Everything else that has to be bought: chassis, ports, switch share."""


class Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The nodes, and who serves which session."""

    nodes: int = 1
    instances_per_node: int = 1
    tp: int = 1
    routing: Literal["sticky", "random"] = "sticky"
    migrate: float = 0.0
    """Share of turns that continue on another node than the one before."""
    dram: float = 0.0
    """Bytes of one node's DRAM tier."""
    dram_read: float = 25e9
    staging: float | None = None
    """Bytes that may be in flight on one node; without it no limit."""
    order: Order = "shortest"
    admission: str = "all"
    """`all`, `second-sight` or `min-tokens=N`."""
    waf: float = 1.1
    """Bytes written to flash per byte saved."""
    drives_max: int = 8
    """Most local drives that one node takes."""


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is asked. `concurrency` is per node, `requests_per_s` of the whole fleet."""

    shape: Literal["wave", "closed", "open", "trace"]
    context_tokens: int | None = None
    """Tokens that were stored before and can be restored."""
    new_tokens: int = 0
    output_tokens: int = 64
    hit_share: float = 1.0
    """Share of requests whose context was stored."""
    concurrency: tuple[int, ...] = ()
    think_time: float = 0.0
    requests_per_s: tuple[float, ...] = ()
    trace: str | None = None
    trace_per_node: bool = True
    """Every node serves a trace of its own like this one; false: one trace spread over the nodes."""
    requests: int = 2000
    """Requests simulated per point of a closed or open load."""
    saved_tokens_per_s: float | None = None
    """Tokens per second that the fleet saves, where no trace says it."""


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What has to be reached, one or several; without any: p90 no slower than recompute's."""

    ttft_p50: float | None = None
    ttft_p90: float | None = None
    ttft_p99: float | None = None


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """US dollars. Defaults are dated in `hardware.py` and shown as assumed."""

    gpu_hour: float | None = None
    flash_per_tb: float | None = None
    dram_per_gb: float | None = None
    years: float = 4.0
    """Over which bought hardware is written off."""


class PlanSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole plan file. `measured` names fields ("engine.fixed_time") whose value somebody measured."""

    model: str
    engine: Engine
    medium: tuple[Medium, ...]
    workload: Workload
    kv_dtype: str | None = None
    fleet: Fleet = Fleet()
    objective: Objective = Objective()
    prices: Prices = Prices()
    stacks: tuple[tuple[str, ...], ...] = ()
    """Further candidates: names of media used together, the nearest first."""
    measured: tuple[str, ...] = ()
    seed: int = 0


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "engine": Engine,
    "medium": Medium,
    "fleet": Fleet,
    "workload": Workload,
    "objective": Objective,
    "prices": Prices,
}
"""The tables of a plan file."""
