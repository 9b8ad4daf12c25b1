"""What serving costs: GPU time that requests take, and storage that has to be there. US dollars.

Cost per million tokens = (GPU-hours + storage-hours) / throughput. The GPU-hours are those that prefill and decode
occupy, so a candidate that computes less leaves GPUs to others; storage is paid whether used or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from rewarm.plan.assess import Assessment, Prepared
from rewarm.plan.cost import Costs
from rewarm.plan.hardware import DRAM_USD_PER_GB, FLASH_USD_PER_TB, GPU_HOUR_USD
from rewarm.plan.media import Candidate
from rewarm.plan.result import Money
from rewarm.plan.spec import Medium, PlanSpec

_HOURS_PER_YEAR = 8766.0


@dataclass(frozen=True)
class Rates:
    """Prices with the defaults filled in, USD."""

    instance_hour: float
    flash_per_byte: float
    dram_hour: float
    hours: float
    """Over which bought hardware is written off."""


def rates_of(spec: PlanSpec) -> Rates:
    """The plan's prices."""
    prices, fleet = spec.prices, spec.fleet
    gpu_hour = GPU_HOUR_USD if prices.gpu_hour is None else prices.gpu_hour
    per_tb = FLASH_USD_PER_TB if prices.flash_per_tb is None else prices.flash_per_tb
    per_gb = DRAM_USD_PER_GB if prices.dram_per_gb is None else prices.dram_per_gb
    hours = prices.years * _HOURS_PER_YEAR
    gpus = spec.engine.gpus or fleet.tp
    return Rates(gpu_hour * gpus, per_tb / 1e12, fleet.dram / 1e9 * per_gb * fleet.nodes / hours, hours)


def medium_usd(spec: PlanSpec, medium: Medium, rates: Rates) -> float:
    """Purchase price of a medium for the whole fleet; drives without price and capacity count nothing."""
    drive = medium.drive_price if medium.drive_price is not None else (medium.capacity or 0.0) * rates.flash_per_byte
    return (drive * medium.drives + medium.extra_price) * (1 if medium.shared else spec.fleet.nodes)


def storage_usd_per_hour(spec: PlanSpec, candidate: Candidate) -> float:
    """Flash and DRAM of the fleet, written off over the plan's years."""
    rates = rates_of(spec)
    return sum(medium_usd(spec, s.medium, rates) for s in candidate.sources) / rates.hours + rates.dram_hour


def usd_per_million_tokens(spec: PlanSpec, one: Prepared | Assessment, requests_per_s: float) -> float:
    """The cost of one candidate at a request rate of the fleet."""
    gpu, storage, tokens_per_hour = _parts(spec, one, requests_per_s)
    return (gpu + storage) / tokens_per_hour * 1e6


def _parts(spec: PlanSpec, one: Prepared | Assessment, rate: float) -> tuple[float, float, float]:
    gpu = rate * one.saturation.gpu_s_per_request * rates_of(spec).instance_hour
    tokens = rate * (one.means.input_tokens + one.means.output_tokens) * 3600
    return gpu, storage_usd_per_hour(spec, one.candidate), tokens


def money_of(spec: PlanSpec, costs: Costs, assessment: Assessment, context_tokens: int) -> Money:
    """The row of one candidate."""
    gpu, storage, tokens = _parts(spec, assessment, assessment.cell.requests_per_s)
    return Money(
        medium=assessment.candidate.name,
        requests_per_s=assessment.cell.requests_per_s,
        gpu_usd_per_hour=gpu,
        storage_usd_per_hour=storage,
        usd_per_million_tokens=(gpu + storage) / tokens * 1e6,
        break_even_interval_s=_interval_s(spec, costs, assessment.candidate, context_tokens),
        reason=f"{assessment.saturation.gpu_s_per_request:.3g} s of an instance per request; storage is "
        f"{storage / (gpu + storage) if gpu + storage else 0:.0%} of the cost",
    )


def _interval_s(spec: PlanSpec, costs: Costs, candidate: Candidate, context_tokens: int) -> float | None:
    """T* = (recompute cost per token) / (rent per token-second)."""
    if len(candidate.sources) != 1:
        return None
    medium, rates = candidate.sources[0].medium, rates_of(spec)
    size = (medium.capacity or 0.0) * medium.drives * (1 if medium.shared else spec.fleet.nodes)
    price = medium_usd(spec, medium, rates)
    if size == 0 or price == 0:
        return None
    compute_s = float(costs.prefill_s([context_tokens], [0])[0])
    recompute_per_token = compute_s / context_tokens * rates.instance_hour / 3600
    rent = float(costs.bytes_of([context_tokens])[0]) / context_tokens * price / size / (rates.hours * 3600)
    return recompute_per_token / rent
