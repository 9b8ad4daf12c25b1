"""A fleet under load, event by event: admission, restore, suffix prefill, batch decode. Seconds and bytes.

A request waits for a place in its instance and for staging on its node, spends the fixed time, restores its bytes from
all its sources at once (each source of a node is a queue in the plan's order; nodes that restore from a shared medium
at one moment share its rate equally), is prefilled for what was not restored (one request after another), and decodes
in a batch whose pace depends on its size. Decode and prefill do not slow each other down, and saves cost no reads.
Everything random is in the requests: the same requests give the same outcome.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rewarm.plan.stations import ORDERS, OneByOne, Sharing, Station

_ARRIVE, _RESTORE, _STATION = 0, 1, 2
_NONE = -1


@dataclass(frozen=True)
class SourceRate:
    """A source that requests restore from. `total_rate` is shared by the nodes; inf for drives in every node."""

    node_rate: float
    total_rate: float = math.inf


@dataclass(frozen=True)
class FleetModel:
    """What serves. `tpot_s` gives seconds per output token for a number of requests that decode together."""

    nodes: int
    instances_per_node: int
    sources: tuple[SourceRate, ...]
    order: str
    tpot_s: Callable[[int], float]
    max_sequences: int = 1 << 30
    staging_bytes: float = math.inf


@dataclass(frozen=True)
class SimRequests:
    """What is asked, one array per field, `n` requests.

    `restore_bytes` has a column per source. `follows[i]` is the request that starts `think_s` after `i` ended
    (-1: none); a request that follows another has `arrival_s` inf. `instance` counts within the node.
    """

    arrival_s: NDArray[np.float64]
    node: NDArray[np.int64]
    instance: NDArray[np.int64]
    fixed_s: NDArray[np.float64]
    restore_bytes: NDArray[np.float64]
    prefill_s: NDArray[np.float64]
    output_tokens: NDArray[np.int64]
    follows: NDArray[np.int64] | None = None
    think_s: float = 0.0

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True)
class Outcome:
    """When each request arrived, had its first token and ended; in s. `busy_s` is how long each source of each node
    was restoring, shape (nodes, sources)."""

    arrival_s: NDArray[np.float64]
    restored_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    busy_s: NDArray[np.float64]

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Seconds from arrival to the first token."""
        return self.first_s - self.arrival_s


def simulate(fleet: FleetModel, requests: SimRequests) -> Outcome:
    """Run all requests to their end."""
    return _Run(fleet, requests).run()


class _Run:
    """The state of one simulation. Stations are numbered: restore queues, then prefill, then decode."""

    def __init__(self, fleet: FleetModel, requests: SimRequests) -> None:
        self._fleet, self._requests = fleet, requests
        count, self._source_count = len(requests), len(fleet.sources)
        self._events: list[tuple[float, int, int, int, int]] = []
        self._serial = 0
        self._instance = (requests.node * fleet.instances_per_node + requests.instance).tolist()
        self._node = requests.node.tolist()
        self._bytes = requests.restore_bytes.tolist()
        self._total = requests.restore_bytes.sum(axis=1).tolist()
        self._parts_left = [0] * count
        self._arrival = requests.arrival_s.tolist()
        self._restored, self._first, self._end = [math.nan] * count, [math.nan] * count, [math.nan] * count
        self._prefill_s, self._output = requests.prefill_s.tolist(), requests.output_tokens.tolist()
        self._fixed_s = requests.fixed_s.tolist()
        self._build_stations()

    def _build_stations(self) -> None:
        fleet = self._fleet
        instances = fleet.nodes * fleet.instances_per_node
        self._stations: list[Station] = [
            ORDERS[fleet.order](source.node_rate) for _ in range(fleet.nodes) for source in fleet.sources
        ]
        self._prefill_at = len(self._stations)
        self._stations += [OneByOne(1.0) for _ in range(instances)]
        self._decode_at = len(self._stations)
        pace = functools.cache(lambda count: 1 / fleet.tpot_s(count))
        self._stations += [Sharing(1.0, pace) for _ in range(instances)]
        self._active: list[set[int]] = [set() for _ in fleet.sources]
        self._busy_since = [math.nan] * self._prefill_at
        self._busy = [0.0] * self._prefill_at
        self._slots = [fleet.max_sequences] * instances
        self._waiting: list[deque[int]] = [deque() for _ in range(instances)]
        self._staged = [0.0] * fleet.nodes
        self._unstaged: list[deque[int]] = [deque() for _ in range(fleet.nodes)]

    def run(self) -> Outcome:
        for request, arrival in enumerate(self._arrival):
            if arrival < math.inf:
                self._schedule(arrival, _ARRIVE, request)
        events = self._events
        while events:
            now, _, what, index, version = heapq.heappop(events)
            if what == _STATION:
                if self._stations[index].version == version:
                    self._station_ended(now, index)
            elif what == _ARRIVE:
                self._arrive(now, index)
            else:
                self._stage(now, index)
        shape = (self._fleet.nodes, self._source_count)
        return Outcome(
            arrival_s=np.array(self._arrival),
            restored_s=np.array(self._restored),
            first_s=np.array(self._first),
            end_s=np.array(self._end),
            busy_s=np.array(self._busy).reshape(shape),
        )

    def _schedule(self, at: float, what: int, index: int, version: int = 0) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, what, index, version))

    def _announce(self, now: float, index: int) -> None:
        station = self._stations[index]
        end = station.next_end(now)
        if end < math.inf:
            self._schedule(end, _STATION, index, station.version)

    def _arrive(self, now: float, request: int) -> None:
        self._arrival[request] = now
        instance = self._instance[request]
        if self._slots[instance]:
            self._slots[instance] -= 1
            self._admit(now, request)
        else:
            self._waiting[instance].append(request)

    def _admit(self, now: float, request: int) -> None:
        if self._total[request] > 0:
            self._schedule(now + self._fixed_s[request], _RESTORE, request)
        else:
            self._start_prefill(now, request)

    def _stage(self, now: float, request: int) -> None:
        node = self._node[request]
        queue = self._unstaged[node]
        queue.append(request)
        self._unstage(now, node)

    def _unstage(self, now: float, node: int) -> None:
        """Let waiting requests restore while staging has room; a request larger than all of it goes alone."""
        queue, limit = self._unstaged[node], self._fleet.staging_bytes
        while queue and (self._staged[node] == 0 or self._staged[node] + self._total[queue[0]] <= limit):
            request = queue.popleft()
            self._staged[node] += self._total[request]
            self._restore(now, request)

    def _restore(self, now: float, request: int) -> None:
        node = self._node[request]
        parts = [(source, size) for source, size in enumerate(self._bytes[request]) if size > 0]
        self._parts_left[request] = len(parts)
        for source, size in parts:
            index = node * self._source_count + source
            if not len(self._stations[index]):
                self._busy_since[index] = now
                self._share(now, source, node, joins=True)
            self._stations[index].add(now, request, size)
            self._announce(now, index)

    def _share(self, now: float, source: int, node: int, joins: bool) -> None:
        """A node starts or ends restoring from a source: the others get another share of a shared one."""
        rate = self._fleet.sources[source]
        if rate.total_rate == math.inf:
            return
        active = self._active[source]
        if joins:
            active.add(node)
        else:
            active.discard(node)
        for other in active:
            index = other * self._source_count + source
            self._stations[index].set_rate(now, min(rate.node_rate, rate.total_rate / len(active)))
            self._announce(now, index)

    def _station_ended(self, now: float, index: int) -> None:
        station = self._stations[index]
        request = station.pop(now)
        if index < self._prefill_at:
            self._part_restored(now, index, request)
        elif index < self._decode_at:
            self._token(now, request)
        else:
            self._finish(now, request)
        self._announce(now, index)

    def _part_restored(self, now: float, index: int, request: int) -> None:
        node, source = divmod(index, self._source_count)
        if not len(self._stations[index]):
            self._busy[index] += now - self._busy_since[index]
            self._share(now, source, node, joins=False)
        self._parts_left[request] -= 1
        if self._parts_left[request] == 0:
            self._restored[request] = now
            self._staged[node] -= self._total[request]
            if self._staged[node] < 1:  # below a byte: rounding of sums
                self._staged[node] = 0.0
            self._start_prefill(now, request)
            self._unstage(now, node)

    def _start_prefill(self, now: float, request: int) -> None:
        if self._prefill_s[request] <= 0:
            self._token(now, request)
            return
        index = self._prefill_at + self._instance[request]
        self._stations[index].add(now, request, self._prefill_s[request])
        self._announce(now, index)

    def _token(self, now: float, request: int) -> None:
        self._first[request] = now
        if self._output[request] <= 1:
            self._finish(now, request)
            return
        index = self._decode_at + self._instance[request]
        self._stations[index].add(now, request, self._output[request] - 1)
        self._announce(now, index)

    def _finish(self, now: float, request: int) -> None:
        self._end[request] = now
        instance = self._instance[request]
        if self._waiting[instance]:
            self._admit(now, self._waiting[instance].popleft())
        else:
            self._slots[instance] += 1
        follows = self._requests.follows
        if follows is not None and follows[request] != _NONE:
            self._schedule(now + self._requests.think_s, _ARRIVE, int(follows[request]))
