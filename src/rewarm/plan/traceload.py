"""A load that comes from a trace: its arrivals and lengths, and what each candidate's tiers hold when it asks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rewarm.plan.cost import Costs
from rewarm.plan.load import Served, serve
from rewarm.plan.media import Candidate
from rewarm.plan.placement import Distances, Routed, distances, route, tier_tokens
from rewarm.plan.spec import PlanSpec
from rewarm.workload import Requests
from rewarm.workload.chains import SessionFinder, sampled, select


@dataclass(frozen=True)
class TraceData:
    """A trace in memory."""

    requests: Requests
    block_tokens: int


@dataclass(frozen=True)
class TraceLoad:
    """The trace on the plan's fleet. `scale` below 1: a sample of sessions, with capacities and time scaled alike."""

    spec: PlanSpec
    costs: Costs
    data: TraceData
    scale: float = 1.0

    @property
    def points(self) -> tuple[float, ...]:
        """One point: the fleet's mean request rate."""
        arrival = self.routed.requests.arrival_s
        return (len(arrival) / max(float(arrival[-1] - arrival[0]), 1e-9),)

    @property
    def context_tokens(self) -> int:
        """The mean prompt."""
        return int(self.data.requests.input_tokens.mean())

    @cached_property
    def routed(self) -> Routed:
        """All requests of the fleet."""
        work = self.spec.workload
        return route(self.data.requests, self.data.block_tokens, self.spec.fleet, work.trace_per_node, self.spec.seed)

    @cached_property
    def distances(self) -> Distances:
        """Where blocks lie, for any capacity."""
        shared = any(medium.shared for medium in self.spec.medium)
        return distances(self.routed, self.spec.fleet.admission, shared=shared)

    def serve(self, candidate: Candidate, point: float) -> Served:
        """All requests; `point` is the trace's own rate."""
        fleet, requests = self.spec.fleet, self.routed.requests
        per_token = max(self.costs.bytes_per_token, 1)
        tokens = tier_tokens(
            self.routed,
            self.distances,
            dram_tokens=fleet.dram / per_token * self.scale,
            sources=tuple(
                (source.medium.shared, source.capacity_bytes / per_token * self.scale) for source in candidate.sources
            ),
            admission=fleet.admission,
        )
        # An engine computes at least the last token of a prompt that was found whole.
        whole = tokens.sum(axis=1) >= requests.input_tokens
        column = tokens.argmax(axis=1)
        tokens[whole, column[whole]] -= 1
        return serve(
            self.costs,
            fleet,
            candidate,
            tokens,
            arrival_s=requests.arrival_s,
            node=self.routed.node,
            instance=self.routed.instance,
            input_tokens=requests.input_tokens,
            output_tokens=np.maximum(requests.output_tokens, 1),
        )

    def sample(self, requests: int) -> TraceLoad:
        """A smaller load like this one: whole sessions, about `requests` of them over the fleet, same request rate.

        Capacities shrink with the number of sessions and time with it, so hit rates and loads stay; bursts do not.
        """
        copies = self.spec.fleet.nodes if self.spec.workload.trace_per_node else 1
        rate = min(1.0, requests / (len(self.data.requests) * copies))
        if rate == 1:
            return self
        sessions = SessionFinder(self.data.block_tokens).assign(self.data.requests)
        kept = select(replace(self.data.requests, session=sessions), sampled(sessions, rate, self.spec.seed))
        if len(kept) < 2:
            return self
        share = len(kept) / len(self.data.requests)
        shorter = replace(kept, arrival_s=kept.arrival_s * share)
        return TraceLoad(self.spec, self.costs, TraceData(shorter, self.data.block_tokens), share)

    def under(self, spec: PlanSpec, costs: Costs) -> TraceLoad:
        """The same trace under another spec; where blocks lie is kept when nothing of it changed."""
        other = TraceLoad(spec, costs, self.data, self.scale)
        same = ("nodes", "instances_per_node", "routing", "migrate")
        if all(getattr(spec.fleet, name) == getattr(self.spec.fleet, name) for name in same):
            other.__dict__["routed"] = self.routed
            if spec.fleet.admission == self.spec.fleet.admission:
                other.__dict__["distances"] = self.distances
        return other
