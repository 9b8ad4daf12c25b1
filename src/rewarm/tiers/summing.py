"""One answer from the answers of several drives: counters, reports of `check`, pins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from rewarm.store.contract import CheckReport, Finding, Outcome, Pin, Stats
from rewarm.store.transfer import Counters
from rewarm.tiers.lane import DriveStats
from rewarm.units import format_rate

SLOW_SHARE = 0.5
"""A drive slower than this share of the fastest one's speed is named in the notes."""


class PoolPin:
    """The pins of all drives as one."""

    def __init__(self, pins: Sequence[Pin], count: int) -> None:
        self._pins = pins
        self.mask = np.logical_or.reduce([pin.mask for pin in pins]) if count else np.zeros(0, np.bool_)

    def release(self) -> None:
        """Let go; calling it twice is harmless."""
        for pin in self._pins:
            pin.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def merged_report(reports: Sequence[tuple[str, CheckReport]]) -> CheckReport:
    """One report: where something is begins with its drive."""

    def placed(name: str, findings: list[Finding]) -> list[Finding]:
        return [msgspec.structs.replace(finding, where=f"{name}: {finding.where}") for finding in findings]

    return CheckReport(
        clean=all(report.clean for _, report in reports),
        findings=[finding for name, report in reports for finding in placed(name, report.findings)],
        notes=[note for name, report in reports for note in placed(name, report.notes)],
        blocks=sum(report.blocks for _, report in reports),
        bytes_verified=sum(report.bytes_verified for _, report in reports),
    )


def merged_stats(counters: Counters, stats: Sequence[Stats], drives: Sequence[DriveStats], broken: str | None) -> Stats:
    """Outcomes from the pool's own counters, bytes from the drives, and a note for whatever is degraded."""
    devices = list(dict.fromkeys(each.device for each in stats))
    named = list(zip([drive.drive for drive in drives], stats, strict=True))
    notes = [f"{name}: {note}" for name, each in named for note in each.notes]
    return Stats(
        device=f"pool of {len(stats)}: {', '.join(devices)}",
        device_refusals=[f"{name}: {refusal}" for name, each in named for refusal in each.device_refusals],
        hits=counters.hits,
        misses=counters.misses(),
        stored=counters.saved(Outcome.STORED),
        already=counters.saved(Outcome.ALREADY),
        refused=counters.refused(),
        bytes_read=sum(each.bytes_read for each in stats),
        bytes_written=sum(each.bytes_written for each in stats),
        bytes_padding=sum(each.bytes_padding for each in stats),
        bytes_log=sum(each.bytes_log for each in stats),
        unreleased_bytes=counters.borrowed_bytes,
        queued_bytes=counters.queued_bytes,
        capacity_bytes=sum(each.capacity_bytes for each in stats),
        used_bytes=sum(each.used_bytes for each in stats),
        blocks=sum(each.blocks for each in stats),
        visibility_bound_s=max(each.visibility_bound_s for each in stats),
        evicted_segments=sum(each.evicted_segments for each in stats),
        evicted_bytes=sum(each.evicted_bytes for each in stats),
        registered_bytes=min(each.registered_bytes for each in stats),
        notes=[*([broken] if broken else []), *drive_notes(drives), *notes],
    )


def drive_notes(drives: Sequence[DriveStats]) -> list[str]:
    """A sentence for each drive that is avoided or slow."""
    notes = []
    speeds = [drive.read_bytes_per_s for drive in drives if drive.read_bytes_per_s is not None]
    fastest = max(speeds, default=0.0)
    for drive in drives:
        if drive.reads != "ok":
            notes.append(f"{drive.drive}: avoided, its blocks are misses: {drive.reads}")
        elif drive.saves != "ok":
            notes.append(f"{drive.drive}: avoided for saves: {drive.saves}")
        speed = drive.read_bytes_per_s
        if speed is not None and speed < SLOW_SHARE * fastest:
            notes.append(
                f"{drive.drive}: slow, {format_rate(speed)} beside {format_rate(fastest)}; "
                f"it gets {drive.share:.0%} of what is saved"
            )
    return notes
