"""Counters of stores and facts of pools as metric families, by the conventions of Prometheus. Pure, no client library.

Names begin with `rewarm_`, end in their base unit (bytes, seconds, blocks), counters in `_total`. Every sample has the
label `store`: the name that whoever exposes it gives the store. `docs/reference/metrics.md` lists all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from rewarm.store.contract import Stats
from rewarm.store.inspection import Inspection


class Sample(msgspec.Struct, frozen=True):
    """One reading: its labels, `store` first, and its value."""

    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True):
    """Readings of one name; all have the same label names."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: list[Sample]


class Definition(msgspec.Struct, frozen=True):
    """A metric that is exposed: where it comes from in `Stats` or `Inspection`, and by which label it is split."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    field: str
    label: str | None = None


STORE_METRICS = (
    Definition("rewarm_hit_blocks_total", "counter", "Blocks loaded and verified.", "hits"),
    Definition("rewarm_missed_blocks_total", "counter", "Blocks of loads that were no hit.", "misses", "cause"),
    Definition("rewarm_stored_blocks_total", "counter", "Blocks saved and published.", "stored"),
    Definition("rewarm_already_stored_blocks_total", "counter", "Blocks of saves that were there.", "already"),
    Definition("rewarm_refused_blocks_total", "counter", "Blocks of saves that were not kept.", "refused", "cause"),
    Definition("rewarm_read_bytes_total", "counter", "Payload bytes read from the medium.", "bytes_read"),
    Definition("rewarm_written_bytes_total", "counter", "Payload bytes written to the medium.", "bytes_written"),
    Definition("rewarm_padding_bytes_total", "counter", "Bytes moved to fill whole device units.", "bytes_padding"),
    Definition("rewarm_log_bytes_total", "counter", "Bytes of index logs read and written.", "bytes_log"),
    Definition("rewarm_evicted_segments_total", "counter", "Segments this handle dropped.", "evicted_segments"),
    Definition("rewarm_evicted_bytes_total", "counter", "Bytes this handle freed by eviction.", "evicted_bytes"),
    Definition("rewarm_unreleased_bytes", "gauge", "Memory of callers that the store still holds.", "unreleased_bytes"),
    Definition("rewarm_queued_bytes", "gauge", "Bytes of saves that wait to be written.", "queued_bytes"),
    Definition("rewarm_registered_bytes", "gauge", "Memory registered with the kernel.", "registered_bytes"),
    Definition("rewarm_admission_saved_bytes_total", "counter", "Kept off flash by admission.", "writes_saved_bytes"),
    Definition("rewarm_admission_lost_blocks_total", "counter", "Saved again: kept off flash before.", "hits_lost"),
    Definition("rewarm_behind_refused_bytes_total", "counter", "Not copied on: over budget.", "behind_refused_bytes"),
    Definition("rewarm_notes", "gauge", "Notes in stats about what is degraded or switched off.", "notes"),
)
"""What only the process knows that uses the store."""

POOL_METRICS = (
    Definition("rewarm_capacity_bytes", "gauge", "Bytes that the pool may take.", "capacity_bytes"),
    Definition("rewarm_used_bytes", "gauge", "Bytes that the pool takes, all writers.", "used_bytes"),
    Definition("rewarm_blocks", "gauge", "Blocks that can be restored.", "blocks"),
    Definition("rewarm_visibility_bound_seconds", "gauge", "Longest until others see a save.", "visibility_bound_s"),
    Definition("rewarm_device_info", "gauge", "Always 1; the label says how the medium is read.", "device", "device"),
    Definition("rewarm_device_refusals", "gauge", "Faster ways to read that were refused.", "device_refusals"),
)
"""What both know: the process that uses a store (in its namespace), and whoever inspects the pool (all of it)."""

INSPECTION_METRICS = (
    Definition("rewarm_free_bytes", "gauge", "Free bytes of the file system.", "free_bytes"),
    Definition("rewarm_namespaces", "gauge", "Namespaces in the pool.", "namespaces"),
    Definition("rewarm_dropped_copies", "gauge", "Copies that are named as damaged.", "dropped_copies"),
    Definition("rewarm_writers", "gauge", "Writers of the pool, by whether a process holds them.", "writers", "alive"),
)
"""What the inspection of a pool knows."""

TIER_METRICS = (
    Definition("rewarm_tier_hit_blocks_total", "counter", "Blocks restored from this tier.", "hits"),
    Definition("rewarm_tier_read_bytes_total", "counter", "Payload bytes restored from this tier.", "bytes_read"),
    Definition("rewarm_tier_written_bytes_total", "counter", "Payload bytes kept in this tier.", "bytes_written"),
    Definition("rewarm_tier_capacity_bytes", "gauge", "Bytes that the tier may take.", "capacity_bytes"),
    Definition("rewarm_tier_used_bytes", "gauge", "Bytes that the tier takes.", "used_bytes"),
)
"""What a store of several media knows of each; labels `tier` (dram, local, shared) and `medium`."""

UP = Definition("rewarm_pool_up", "gauge", "1 when the pool could be read, else 0.", "")
METRICS = (*STORE_METRICS, *POOL_METRICS, *TIER_METRICS, *INSPECTION_METRICS, UP)


def store_families(stats: Mapping[str, Stats]) -> list[Family]:
    """The families of running stores, by name."""
    families = [_family(definition, stats) for definition in (*STORE_METRICS, *POOL_METRICS)]
    return families + [_tier_family(definition, stats) for definition in TIER_METRICS]


def pool_families(pools: Mapping[str, Inspection | None]) -> list[Family]:
    """The families of inspected pools, by name; None for one that could not be read."""
    known = {name: inspection for name, inspection in pools.items() if inspection is not None}
    up = Family(UP.name, UP.kind, UP.help, [Sample({"store": n}, float(n in known)) for n in pools])
    return [up, *(_family(definition, known) for definition in (*POOL_METRICS, *INSPECTION_METRICS))]


def _family(definition: Definition, sources: Mapping[str, Stats] | Mapping[str, Inspection]) -> Family:
    samples: list[Sample] = []
    for name, source in sources.items():
        samples += _samples(definition, name, getattr(source, definition.field))
    return Family(definition.name, definition.kind, definition.help, samples)


def _tier_family(definition: Definition, stats: Mapping[str, Stats]) -> Family:
    samples = [
        Sample({"store": name, "tier": tier.tier, "medium": tier.medium}, getattr(tier, definition.field))
        for name, source in stats.items()
        for tier in source.tiers
    ]
    return Family(definition.name, definition.kind, definition.help, samples)


def _samples(definition: Definition, store: str, value: object) -> list[Sample]:
    label = definition.label
    if label == "alive":
        found = [writer.alive for writer in value]  # type: ignore[attr-defined]  # a list of WriterFacts
        return [Sample({"store": store, label: str(state).lower()}, found.count(state)) for state in (True, False)]
    if label is not None and isinstance(value, dict):
        return [Sample({"store": store, label: cause}, count) for cause, count in value.items()]
    if label is not None:
        return [Sample({"store": store, label: str(value)}, 1)]
    if isinstance(value, (int, float)):
        return [Sample({"store": store}, value)]
    return [Sample({"store": store}, len(value))]  # type: ignore[arg-type]  # a list: how many
