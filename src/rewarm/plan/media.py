"""How fast each candidate restores, and what limits it. A candidate is recompute, one medium, or a stack of them.

B_eff = min(drives x B_drive x eta_raid, link x eta_link, host-to-device copy, reader). Of a shared medium one node gets
at most its own port, and all nodes that restore at the same moment share the array's drives and ports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from rewarm.plan.hardware import DEFAULT_LINK_EFFICIENCY, LINK_EFFICIENCY
from rewarm.plan.spec import Medium, PlanSpec


@dataclass(frozen=True)
class Source:
    """A medium as the simulator sees it. Rates in bytes/s; `total` is what all nodes of a shared medium share."""

    medium: Medium
    node_rate: float
    node_limit: str
    total_rate: float
    total_limit: str
    fixed_s: float
    capacity_bytes: float
    """Of one node's drives, or of the whole array; inf when the plan does not say."""

    @property
    def rate(self) -> float:
        """What one node gets when it is alone."""
        return min(self.node_rate, self.total_rate)

    @property
    def limit(self) -> str:
        """The part that sets `rate`."""
        return self.node_limit if self.node_rate <= self.total_rate else self.total_limit


@dataclass(frozen=True)
class Candidate:
    """One way to serve the workload; no sources is recompute."""

    name: str
    sources: tuple[Source, ...]

    @property
    def kind(self) -> str:
        """The word of the verdict: recompute, one local drive, several local drives, shared array, or tiers."""
        if not self.sources:
            return "recompute"
        if len(self.sources) > 1:
            return "tiers"
        medium = self.sources[0].medium
        if medium.shared:
            return "shared array"
        return "one local drive" if medium.drives == 1 else "several local drives"


def source_of(medium: Medium, spec: PlanSpec) -> Source:
    """The rates of one medium."""
    efficiency = medium.link_efficiency
    if efficiency is None:
        efficiency = LINK_EFFICIENCY.get(medium.protocol or "", DEFAULT_LINK_EFFICIENCY)
    drives = (medium.drive_read or math.inf) * medium.drives * medium.raid_efficiency
    link = (medium.link or math.inf) * efficiency
    own = [(medium.host_copy or math.inf, "host-to-device copy"), (medium.reader or math.inf, "reader")]
    if medium.shared:
        total = [(drives, "drives"), (link * medium.ports, "ports")]
        own.append(((medium.node_link or math.inf) * efficiency if medium.node_link else link, "node's port"))
        if medium.effective_read is not None:
            total = [(medium.effective_read, "measured rate")]
            own = [(medium.effective_read, "measured rate"), *own[:2]]
    else:
        total = [(math.inf, "drives")]
        own += [(drives, "drives"), (link, "link")]
        if medium.effective_read is not None:
            own = [(medium.effective_read, "measured rate")]
    (node_rate, node_limit), (total_rate, total_limit) = min(own), min(total)
    capacity = (medium.capacity or math.inf) * medium.drives
    fixed = medium.fixed_time if medium.fixed_time is not None else spec.engine.fixed_time
    return Source(medium, node_rate, node_limit, total_rate, total_limit, fixed, capacity)


def with_drives(medium: Medium, drives: int) -> Medium:
    """The same medium with another number of drives; a measured rate scales with them up to what else limits."""
    if drives == medium.drives:
        return medium
    rate = medium.effective_read
    return msgspec.structs.replace(
        medium, drives=drives, effective_read=None if rate is None else rate * drives / medium.drives
    )


def candidates_of(spec: PlanSpec) -> list[Candidate]:
    """Recompute, every medium, and the stacks of the plan, in that order."""
    sources = {medium.name: source_of(medium, spec) for medium in spec.medium}
    single = [Candidate(name, (source,)) for name, source in sources.items()]
    stacked = [Candidate("+".join(names), tuple(sources[name] for name in names)) for names in spec.stacks]
    return [Candidate("recompute", ()), *single, *stacked]


def drive_counts(spec: PlanSpec) -> list[Candidate]:
    """Every local medium at 1, 2, 4, .. drives up to `fleet.drives_max`, for the choice of how many."""
    found = []
    for medium in spec.medium:
        if medium.shared:
            continue
        counts = sorted({medium.drives, *(2**k for k in range(11) if 2**k <= spec.fleet.drives_max)})
        for count in counts:
            sized = with_drives(medium, count)
            found.append(Candidate(f"{medium.name} x {count}", (source_of(sized, spec),)))
    return found
