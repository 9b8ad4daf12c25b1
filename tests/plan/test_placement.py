"""Where blocks lie, against tiers of real LRU caches; and who serves which session."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from rewarm.plan.placement import distances, route, tier_tokens
from rewarm.plan.spec import Fleet
from rewarm.workload import Requests
from rewarm.workload.requests import RequestsBuilder, Row

BLOCK = 16


@pytest.fixture(scope="module")
def trace() -> Requests:
    """300 turns of 40 conversations behind a common first block, of different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 6, 40)
    builder = RequestsBuilder(BLOCK)
    for turn in range(300):
        session = int(rng.integers(40))
        lengths[session] += int(rng.integers(0, 3))
        blocks = [0] + [1 + session * 1000 + k for k in range(lengths[session])]
        builder.add(Row("row", float(turn), len(blocks) * BLOCK, 4, blocks, session))
    return builder.take()


class Lru:
    """A cache of so many blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    def touch(self, block: int) -> int | None:
        """Put a block first; the block that falls out, if any."""
        self.blocks[block] = None
        self.blocks.move_to_end(block)
        return self.blocks.popitem(last=False)[0] if len(self.blocks) > self.capacity else None


def replay(
    requests: Requests, node: NDArray[np.int64], nodes: int, dram: int, local: int, shared: int
) -> NDArray[np.int64]:
    """Blocks of leading runs by where a replay finds them, columns local, shared, DRAM. What falls out of DRAM goes
    to the drives, and what is used again comes back: the two hold different blocks."""
    drams, locals_, pool = [Lru(dram) for _ in range(nodes)], [Lru(local) for _ in range(nodes)], Lru(shared)
    found = np.zeros((len(requests), 3), dtype=np.int64)
    for index in range(len(requests)):
        here, leading = int(node[index]), True
        for block in requests.blocks[requests.offsets[index] : requests.offsets[index + 1]].tolist():
            places = [block in locals_[here], block in pool, block in drams[here]]
            if leading and places[2]:
                found[index, 2] += 1
            elif leading and places[0]:
                found[index, 0] += 1
            elif leading and places[1]:
                found[index, 1] += 1
            else:
                leading = False
            locals_[here].blocks.pop(block, None)
            out = drams[here].touch(block)
            if out is not None:
                locals_[here].touch(out)
            pool.touch(block)
    return found


@pytest.mark.parametrize(("dram", "local", "shared"), [(30, 60, 150), (1, 20, 400), (200, 10, 20), (60, 500, 1)])
def test_three_tiers_equal_a_replay(trace: Requests, dram: int, local: int, shared: int) -> None:
    fleet = Fleet(nodes=3, migrate=0.3)
    routed = route(trace, BLOCK, fleet, False, seed=1)
    found = distances(routed, "all", shared=True)
    tokens = tier_tokens(
        routed, found, dram_tokens=dram * BLOCK,
        sources=((False, local * BLOCK), (True, shared * BLOCK)), admission="all",
    )  # fmt: skip
    expected = replay(routed.requests, routed.node, 3, dram, local, shared)
    assert (tokens // BLOCK).tolist() == expected.tolist()
    assert expected.sum() > 1000


def test_second_sight_stores_at_the_second_touch(trace: Requests) -> None:
    routed = route(trace, BLOCK, Fleet(), False, seed=1)
    found = distances(routed, "second-sight", shared=False)
    tokens = tier_tokens(routed, found, dram_tokens=0, sources=((False, np.inf),), admission="second-sight")
    seen: dict[int, int] = {}
    for index in range(len(trace)):
        run = 0
        blocks = trace.blocks[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        for block in blocks:
            if seen.get(block, 0) < 2:
                break
            run += 1
        for block in blocks:
            seen[block] = seen.get(block, 0) + 1
        assert tokens[index, 0] == run * BLOCK


def test_min_tokens_stores_long_prompts_only(trace: Requests) -> None:
    routed = route(trace, BLOCK, Fleet(), False, seed=1)
    limit = int(np.median(trace.input_tokens))
    admission = f"min-tokens={limit}"
    tokens = tier_tokens(
        routed, distances(routed, admission, shared=False), dram_tokens=0, sources=((False, np.inf),),
        admission=admission,
    )  # fmt: skip
    stored: set[int] = set()
    for index in range(len(trace)):
        blocks = trace.blocks[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        run = next((k for k, block in enumerate(blocks) if block not in stored), len(blocks))
        assert tokens[index, 0] == run * BLOCK
        if trace.input_tokens[index] >= limit:
            stored.update(blocks)


def test_a_trace_per_node_multiplies_the_load_and_shares_nothing(trace: Requests) -> None:
    routed = route(trace, BLOCK, Fleet(nodes=4), True, seed=1)
    assert len(routed.requests) == 4 * len(trace)
    assert np.bincount(routed.node).tolist() == [len(trace)] * 4
    assert np.all(np.diff(routed.requests.arrival_s) >= 0)
    blocks = [set(routed.requests.blocks[routed.node[routed.requests.owners()] == n].tolist()) for n in range(4)]
    assert all(blocks[0].isdisjoint(other) for other in blocks[1:])
    alone = distances(route(trace, BLOCK, Fleet(), False, 1), "all", shared=False).dram
    mine = distances(routed, "all", shared=False).dram[routed.node[routed.requests.owners()] == 2]
    assert mine.tolist() == alone.tolist()


def moved_share(routed_node: NDArray[np.int64], session: NDArray[np.int64]) -> float:
    order = np.argsort(session, kind="stable")
    same = session[order][1:] == session[order][:-1]
    return float((routed_node[order][1:] != routed_node[order][:-1])[same].mean())


def test_routing(trace: Requests) -> None:
    many = Fleet(nodes=8)
    sticky = route(trace, BLOCK, many, False, seed=2)
    assert moved_share(sticky.node, sticky.requests.session) == 0
    assert len(set(sticky.node.tolist())) == 8
    moving = route(trace, BLOCK, Fleet(nodes=8, migrate=0.25), False, seed=2)
    assert moved_share(moving.node, moving.requests.session) == pytest.approx(0.25, abs=0.06)
    anywhere = route(trace, BLOCK, Fleet(nodes=8, routing="random"), False, seed=2)
    assert moved_share(anywhere.node, anywhere.requests.session) == pytest.approx(7 / 8, abs=0.06)
    assert set(route(trace, BLOCK, replace_nodes(many, 1), False, 2).node.tolist()) == {0}


def replace_nodes(fleet: Fleet, nodes: int) -> Fleet:
    return Fleet(nodes=nodes, migrate=fleet.migrate)


def test_a_migrating_session_finds_its_blocks_in_the_array_only(trace: Requests) -> None:
    still = replace(trace)
    hits = {}
    for migrate in (0.0, 1.0):
        routed = route(still, BLOCK, Fleet(nodes=8, migrate=migrate), False, seed=3)
        found = distances(routed, "all", shared=True)
        for shared in (False, True):
            tokens = tier_tokens(routed, found, dram_tokens=0, sources=((shared, np.inf),), admission="all")
            hits[migrate, shared] = int(tokens.sum())
    assert hits[1.0, True] == hits[0.0, True]
    assert hits[1.0, False] < 0.8 * hits[0.0, False]
