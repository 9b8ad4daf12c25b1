"""From a handle's counters to its `Stats`."""

from __future__ import annotations

from typing import Any

from rewarm.store.contract import Outcome, Stats
from rewarm.store.devices.select import Choice
from rewarm.store.transfer import Counters


def report(counters: Counters, choice: Choice, **facts: Any) -> Stats:
    """Stats of a handle; `facts` are the fields that are no counters."""
    return Stats(
        device=choice.name,
        device_refusals=list(choice.refusals),
        hits=counters.hits,
        misses=counters.misses(),
        stored=counters.saved(Outcome.STORED),
        already=counters.saved(Outcome.ALREADY),
        refused=counters.refused(),
        bytes_read=counters.bytes_read,
        bytes_written=counters.bytes_written,
        bytes_padding=counters.bytes_padding,
        bytes_log=counters.bytes_log,
        unreleased_bytes=counters.borrowed_bytes,
        queued_bytes=counters.queued_bytes,
        evicted_segments=counters.evicted_segments,
        evicted_bytes=counters.evicted_bytes,
        **facts,
    )
