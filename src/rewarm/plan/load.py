"""What the workload asks of one candidate: requests for the simulator and their means, for every point of the load.

`SyntheticLoad` makes equal requests (wave, closed, open); `traceload.TraceLoad` takes them from a trace. A restore that
alone would end later than prefill is not made: the request is computed instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rewarm.plan.cost import Costs
from rewarm.plan.media import Candidate, Source
from rewarm.plan.simulate import FleetModel, SimRequests, SourceRate
from rewarm.plan.spec import Fleet, PlanSpec
from rewarm.workload import arrivals


@dataclass(frozen=True)
class Means:
    """Means over the requests of a load: what one request costs each resource, seconds and bytes."""

    prefill_s: float
    restore_bytes: tuple[float, ...]
    """Per source of the candidate, DRAM not counted."""
    input_tokens: float
    output_tokens: float
    hit_tokens: float
    skipped_share: float
    """Requests whose stored context is computed instead, because loading it would be slower."""


@dataclass(frozen=True)
class Served:
    """The requests of one point of a load as one candidate serves them."""

    requests: SimRequests
    input_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    skipped: NDArray[np.bool_]

    def means(self, sources: int) -> Means:
        """Means over all requests; the first `sources` columns are the candidate's media."""
        return Means(
            prefill_s=float(self.requests.prefill_s.mean()),
            restore_bytes=tuple(float(v) for v in self.requests.restore_bytes[:, :sources].mean(axis=0)),
            input_tokens=float(self.input_tokens.mean()),
            output_tokens=float(self.requests.output_tokens.mean()),
            hit_tokens=float(self.hit_tokens.mean()),
            skipped_share=float(self.skipped.mean()),
        )


class Load(Protocol):
    """A workload with one or several points: concurrencies per node, request rates, or one trace."""

    @property
    def costs(self) -> Costs:
        """What requests cost."""

    @property
    def points(self) -> tuple[float, ...]:
        """The values of the load; a trace has one, its request rate."""

    @property
    def context_tokens(self) -> int:
        """A typical number of tokens that a request restores or would."""

    def serve(self, candidate: Candidate, point: float) -> Served:
        """The requests of one point, with what this candidate finds for them."""

    def sample(self, requests: int) -> Load:
        """A load like this one with about that many requests per point; itself when it has no more."""

    def under(self, spec: PlanSpec, costs: Costs) -> Load:
        """The same load under another spec."""


@dataclass(frozen=True)
class SyntheticLoad:
    """Equal requests: a wave of N per node, N clients per node in a closed loop, or Poisson arrivals at the fleet."""

    spec: PlanSpec
    costs: Costs

    @property
    def points(self) -> tuple[float, ...]:
        """Concurrencies per node, or requests/s of the fleet."""
        work = self.spec.workload
        return tuple(float(n) for n in work.concurrency) or work.requests_per_s

    @property
    def context_tokens(self) -> int:
        """The context that was stored."""
        return int(self.spec.workload.context_tokens or 0)

    def serve(self, candidate: Candidate, point: float) -> Served:
        """The requests of one point. Every draw comes from the plan's seed."""
        work, fleet = self.spec.workload, self.spec.fleet
        rng = np.random.default_rng(self.spec.seed)
        arrival, node, follows = self._arrivals(point, rng)
        count = len(node)
        tokens = self._found(candidate, count, rng)
        input_tokens = np.full(count, self.context_tokens + work.new_tokens)
        output = np.full(count, work.output_tokens)
        return serve(
            self.costs, fleet, candidate, tokens,
            arrival_s=arrival, node=node, instance=np.arange(count) % fleet.instances_per_node,
            input_tokens=input_tokens, output_tokens=output, follows=follows, think_s=work.think_time,
        )  # fmt: skip

    def sample(self, requests: int) -> SyntheticLoad:
        """The same points with fewer requests; a wave stays as it is."""
        fewer = msgspec.structs.replace(self.spec.workload, requests=min(requests, self.spec.workload.requests))
        return SyntheticLoad(msgspec.structs.replace(self.spec, workload=fewer), self.costs)

    def under(self, spec: PlanSpec, costs: Costs) -> SyntheticLoad:
        """The same number of requests under another spec."""
        work = msgspec.structs.replace(spec.workload, requests=self.spec.workload.requests)
        return SyntheticLoad(msgspec.structs.replace(spec, workload=work), costs)

    def _arrivals(
        self, point: float, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64] | None]:
        work, nodes = self.spec.workload, self.spec.fleet.nodes
        if work.shape == "wave":
            node = np.repeat(np.arange(nodes), int(point))
            return arrivals.wave(len(node)), node, None
        if work.shape == "open":
            arrival = arrivals.poisson(point, work.requests, self.spec.seed)
            return arrival, rng.integers(nodes, size=work.requests), None
        clients = int(point) * nodes
        rounds = max(math.ceil(work.requests / clients), 10)
        follows = np.arange(clients, clients * (rounds + 1))
        follows[follows >= clients * rounds] = -1
        arrival = np.full(clients * rounds, math.inf)
        arrival[:clients] = 0.0
        node = np.tile(np.repeat(np.arange(nodes), int(point)), rounds)
        return arrival, node, follows

    def _found(self, candidate: Candidate, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Context tokens found per source, shape (count, sources + 1); the last column is DRAM, empty when cold."""
        stored, home = rng.random(count) < self.spec.workload.hit_share, rng.random(count) < stays(self.spec.fleet)
        tokens = np.zeros((count, len(candidate.sources) + 1), dtype=np.int64)
        left = stored
        for column, source in enumerate(candidate.sources):
            here = left if source.medium.shared else left & home
            tokens[here, column] = self.context_tokens
            left = left & ~here
        return tokens


def stays(fleet: Fleet) -> float:
    """Share of turns served by the node that served the turn before."""
    if fleet.nodes == 1:
        return 1.0
    return 1 / fleet.nodes if fleet.routing == "random" else 1 - fleet.migrate


def serve(
    costs: Costs,
    fleet: Fleet,
    candidate: Candidate,
    tokens: NDArray[np.int64],
    *,
    arrival_s: NDArray[np.float64],
    node: NDArray[np.int64],
    instance: NDArray[np.int64],
    input_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    follows: NDArray[np.int64] | None = None,
    think_s: float = 0.0,
) -> Served:
    """Requests for the simulator from the tokens found per source, shape (n, sources + 1), DRAM last."""
    hit = tokens.sum(axis=1)
    full_s = costs.prefill_s(input_tokens, np.zeros_like(input_tokens))
    rest_s = np.where(hit < input_tokens, costs.prefill_s(np.maximum(input_tokens - hit, 0), hit), 0.0)
    per_token = costs.bytes_of(hit) / np.maximum(hit, 1)
    restore = tokens * per_token[:, None]
    rates = np.array([source.rate for source in candidate.sources] + [fleet.dram_read])
    flash = tokens[:, :-1].sum(axis=1) > 0
    fixed_s = np.where(flash, max((source.fixed_s for source in candidate.sources), default=0.0), 0.0)
    alone_s = fixed_s + (restore / rates).max(axis=1) + rest_s
    skipped = (hit > 0) & (alone_s >= full_s)
    restore[skipped] = 0.0
    requests = SimRequests(
        arrival_s=arrival_s,
        node=node,
        instance=instance,
        fixed_s=fixed_s,
        restore_bytes=restore,
        prefill_s=np.where(skipped, full_s, rest_s),
        output_tokens=output_tokens,
        follows=follows,
        think_s=think_s,
    )
    return Served(requests, input_tokens, np.where(skipped, 0, hit), skipped)


def fleet_model(spec: PlanSpec, costs: Costs, candidate: Candidate) -> FleetModel:
    """The fleet as the simulator sees it; the last source is DRAM."""
    fleet = spec.fleet
    return FleetModel(
        nodes=fleet.nodes,
        instances_per_node=fleet.instances_per_node,
        sources=(*map(_rate, candidate.sources), SourceRate(fleet.dram_read)),
        order=fleet.order,
        tpot_s=costs.tpot_s,
        max_sequences=spec.engine.max_sequences,
        staging_bytes=fleet.staging if fleet.staging is not None else math.inf,
    )


def _rate(source: Source) -> SourceRate:
    return SourceRate(source.node_rate, source.total_rate)
