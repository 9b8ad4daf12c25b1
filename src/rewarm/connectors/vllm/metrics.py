"""Rewarm's counters in vLLM's terms: they leave through the engine's own metrics, beside those of its tiering."""

from __future__ import annotations

from typing import Any

from rewarm.connectors.vllm.choosing import Chooser
from rewarm.connectors.vllm.traffic import Traffic
from rewarm.store.contract import Stats

PREFIX = "vllm:rewarm_"
_FAILED = f"{PREFIX}failed_blocks"
_COUNTERS = {
    "restored_bytes": "Bytes of blocks restored from the store.",
    "stored_bytes": "Bytes of blocks handed to the store and kept.",
    "device_read_bytes": "Payload bytes read from the medium.",
    "device_written_bytes": "Payload bytes written to the medium.",
    "padding_bytes": "Bytes moved beside payload: padding and logs.",
    "computed_blocks": "Blocks that the store holds and the engine computes, because loading them would end later.",
    "cut_requests": "Requests that were computed in part or whole for that reason.",
}
_GAUGES = {
    "used_bytes": "Bytes the pool occupies, of all its writers.",
    "capacity_bytes": "Bytes the pool may occupy.",
    "blocks": "Blocks that can be restored, in this namespace.",
    "unreleased_bytes": "Memory of the primary region that the store or the kernel still holds.",
}


def definitions(base: Any) -> dict[str, Any]:
    """Definitions of every metric; `base` is vLLM's module of metric definitions."""
    found = {PREFIX + name: base.OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()}
    found[_FAILED] = base.OffloadingCounterMetadata(
        documentation="Blocks that were not restored or not stored, by direction and cause.",
        labelnames=("direction", "cause"),
    )
    for name, text in _GAUGES.items():
        found[PREFIX + name] = base.OffloadingGaugeMetadata(documentation=text)
    return found


def observe(into: Any, store: Stats, traffic: Traffic, chooser: Chooser, reported: dict[str, Any]) -> Any:
    """Add what changed since `reported`, which is brought up to date, to vLLM's stats `into`, and return them."""
    totals = {
        "restored_bytes": traffic.loaded_bytes,
        "stored_bytes": traffic.saved_bytes,
        "device_read_bytes": store.bytes_read,
        "device_written_bytes": store.bytes_written,
        "padding_bytes": store.bytes_padding + store.bytes_log,
        "computed_blocks": chooser.refused_blocks,
        "cut_requests": chooser.cut_requests,
    }
    for name, total in totals.items():
        if total > (before := reported.get(name, 0)):
            into.increase_counter(PREFIX + name, total - before)
            reported[name] = total
    for label, count in traffic.failures.counts.items():
        if count > (before := reported.get(label, 0)):
            into.increase_counter(_FAILED, count - before, tuple(label.split(" ", 1)))
            reported[label] = count
    for name in _GAUGES:
        into.set_gauge(PREFIX + name, getattr(store, name))
    return into
