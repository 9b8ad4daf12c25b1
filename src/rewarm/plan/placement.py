"""Where the blocks of a trace lie: which node serves each request, and in which tier it finds its leading run.

Each node has an LRU stack of its own for DRAM and its drives, and a shared medium has one stack of the whole fleet.
Distances are exact and do not depend on capacities, so one pass serves every capacity. DRAM and local drives hold
different blocks (a block pushed out of DRAM is on flash): found in DRAM below C1, on the drives below C1 + C2. Under an
admission filter a flash tier sees only what it lets through; the filter remembers all blocks for ever, and a block
that was pushed out is let in again at its next touch, which is a little better than a filter that forgets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rewarm.plan.spec import Fleet
from rewarm.workload import Requests
from rewarm.workload.chains import SessionFinder
from rewarm.workload.hitcurve import NEVER
from rewarm.workload.requests import concatenate
from rewarm.workload.stack import StackDistances

_COPY_SALT = 0x9E3779B97F4A7C15
START_SPREAD_S = 60.0
"""Traces of different nodes start within a minute of each other, so that their bursts do not coincide."""


@dataclass(frozen=True)
class Routed:
    """All requests of a fleet in order of arrival, with the node and instance that serve each."""

    requests: Requests
    node: NDArray[np.int64]
    instance: NDArray[np.int64]
    block_tokens: int


@dataclass(frozen=True)
class Distances:
    """Stack distances of every block reference, in blocks: of the node's DRAM, its drives, and the shared medium."""

    dram: NDArray[np.int64]
    local: NDArray[np.int64]
    shared: NDArray[np.int64]


def route(trace: Requests, block_tokens: int, fleet: Fleet, per_node: bool, seed: int) -> Routed:
    """Give every request of a trace to a node. With `per_node` each node gets a trace of its own like this one."""
    rng = np.random.default_rng(seed)
    sessions = SessionFinder(block_tokens).assign(trace)
    if per_node and fleet.nodes > 1:
        copies = [_copy(trace, sessions, copy, rng) for copy in range(fleet.nodes)]
        merged = concatenate(copies)
        home = np.repeat(np.arange(fleet.nodes), len(trace))
        order = np.argsort(merged.arrival_s, kind="stable")
        requests, home = _reorder(merged, order), home[order]
    else:
        requests = replace(trace, session=sessions)
        home = (_mixed(sessions) % np.uint64(fleet.nodes)).astype(np.int64)
    instance = (_mixed(requests.session) // np.uint64(7) % np.uint64(fleet.instances_per_node)).astype(np.int64)
    return Routed(requests, _nodes(requests.session, home, fleet, rng), instance, block_tokens)


def _copy(trace: Requests, sessions: NDArray[np.int64], copy: int, rng: np.random.Generator) -> Requests:
    start = rng.uniform(0, START_SPREAD_S)
    return replace(
        trace,
        arrival_s=trace.arrival_s + start,
        session=sessions + copy * (int(sessions.max()) + 1),
        blocks=trace.blocks ^ np.uint64(_COPY_SALT * copy & (1 << 64) - 1),
    )


def _mixed(values: NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.asarray((values.astype(np.uint64) + np.uint64(1)) * np.uint64(_COPY_SALT) >> np.uint64(20))


def _reorder(requests: Requests, order: NDArray[np.int64]) -> Requests:
    counts = np.diff(requests.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    places = np.repeat(requests.offsets[:-1][order] - offsets[:-1], counts) + np.arange(offsets[-1])
    return Requests(
        arrival_s=requests.arrival_s[order],
        input_tokens=requests.input_tokens[order],
        output_tokens=requests.output_tokens[order],
        session=requests.session[order],
        hit_tokens=requests.hit_tokens[order],
        offsets=offsets.astype(np.int64),
        blocks=requests.blocks[places],
    )


def _nodes(
    sessions: NDArray[np.int64], home: NDArray[np.int64], fleet: Fleet, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The node of every request: at home, anywhere, or moving to another node with probability `migrate` per turn."""
    count, nodes = len(sessions), fleet.nodes
    if nodes == 1:
        return np.zeros(count, dtype=np.int64)
    if fleet.routing == "random":
        return rng.integers(nodes, size=count)
    if not fleet.migrate:
        return home
    order = np.argsort(sessions, kind="stable")
    first = np.concatenate([[True], sessions[order][1:] != sessions[order][:-1]])
    steps = np.where((rng.random(count) < fleet.migrate) & ~first, rng.integers(1, nodes, size=count), 0)
    walked = np.cumsum(steps)
    turns = np.diff(np.concatenate([np.flatnonzero(first), [count]]))
    walked -= np.repeat(walked[first], turns)
    nodes_of = np.empty(count, dtype=np.int64)
    nodes_of[order] = (np.repeat(home[order][first], turns) + walked) % nodes
    return nodes_of


def distances(routed: Routed, admission: str, *, shared: bool) -> Distances:
    """Stack distances of all references; those of a shared medium only when asked for."""
    requests = routed.requests
    owners = requests.owners()
    times, node_of = requests.arrival_s[owners], routed.node[owners]
    size = len(requests.blocks)
    dram = np.full(size, NEVER, dtype=np.int64)
    local = dram.copy()
    long_enough = _long_enough(requests, owners, admission)
    for node in np.unique(routed.node):
        mine = np.flatnonzero(node_of == node)
        blocks, when = requests.blocks[mine], times[mine]
        dram[mine] = _distance(blocks, when)
        admitted = mine[_admitted(blocks, long_enough[mine], admission)]
        local[admitted] = _distance(requests.blocks[admitted], times[admitted])
    pool = np.full(size, NEVER, dtype=np.int64)
    if shared:
        admitted = np.flatnonzero(_admitted(requests.blocks, long_enough, admission))
        pool[admitted] = _distance(requests.blocks[admitted], times[admitted])
    return Distances(dram, local, pool)


def _distance(blocks: NDArray[np.uint64], times: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.minimum(StackDistances().push(blocks, times).distance, NEVER)


def _long_enough(requests: Requests, owners: NDArray[np.int64], admission: str) -> NDArray[np.bool_]:
    if not admission.startswith("min-tokens="):
        return np.ones(len(owners), dtype=bool)
    return requests.input_tokens[owners] >= int(admission.removeprefix("min-tokens="))


def admitted_touches(requests: Requests, admission: str) -> NDArray[np.bool_]:
    """References that one flash tier serving all of these requests would see under an admission rule."""
    return _admitted(requests.blocks, _long_enough(requests, requests.owners(), admission), admission)


def _admitted(blocks: NDArray[np.uint64], allowed: NDArray[np.bool_], admission: str) -> NDArray[np.bool_]:
    """Touches that a flash tier sees: those from a block's admission on."""
    if admission == "all":
        return np.ones(len(blocks), dtype=bool)
    unique, first, inverse = np.unique(blocks, return_index=True, return_inverse=True)
    place = np.arange(len(blocks))
    if admission == "second-sight":
        return np.asarray(place > first[inverse])
    entry = np.full(len(unique), len(blocks))
    np.minimum.at(entry, inverse[allowed], place[allowed])
    return np.asarray(place >= entry[inverse])


def tier_tokens(
    routed: Routed,
    found: Distances,
    *,
    dram_tokens: float,
    sources: tuple[tuple[bool, float], ...],
    admission: str,
) -> NDArray[np.int64]:
    """Tokens of each request's leading run by where they lie, shape (n, sources + 1); the last column is DRAM.

    `sources` are (shared, capacity in tokens of the node or of the array), the nearest first.
    """
    block = routed.block_tokens
    owners = routed.requests.owners()
    tokens = routed.requests.block_tokens_of(block)
    where = np.full(len(owners), -1, dtype=np.int64)
    below = dram_tokens / block
    for column, (shared, capacity) in reversed(list(enumerate(sources))):
        if shared:
            where[found.shared < min(capacity / block, NEVER)] = column
        else:
            limit = min(capacity / block + (below if admission == "all" else 0), NEVER)
            where[found.local < limit] = column
    where[found.dram < min(below, NEVER)] = len(sources)
    missed = np.maximum.accumulate(np.where(where < 0, owners + 1, 0))
    leading = missed <= owners
    flat = owners[leading] * (len(sources) + 1) + where[leading]
    counted = np.bincount(flat, tokens[leading], len(routed.requests) * (len(sources) + 1))
    return counted.astype(np.int64).reshape(len(routed.requests), -1)
