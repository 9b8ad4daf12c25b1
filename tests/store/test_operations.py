"""Planning: every byte of every block is covered once, in pieces that are never too long."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.store.operations import OPERATION_BYTES, OperationPlan, longest_read, plan_operations

UNIT = 512
LARGEST = 3 * OPERATION_BYTES


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Blocks (segment, offset, address, length) in file order; the next one often follows on both sides."""
    blocks, segment, offset, address = [], 0, 0, 0
    for _ in range(draw(st.integers(0, 12))):
        length = UNIT * draw(st.one_of(st.integers(1, 64), st.integers(1, LARGEST // UNIT)))
        step = draw(st.sampled_from(["both", "both", "both", "file", "memory", "segment"]))
        if step == "segment":
            segment, offset = segment + 1, UNIT * draw(st.integers(0, 9))
        elif step != "both" and step != "file":
            offset += UNIT * draw(st.integers(1, 9))
        if step not in ("both", "memory"):
            address += UNIT * draw(st.integers(1, 9))
        blocks.append((segment, offset, address, length))
        offset, address = offset + length, address + length
    return blocks


def plan_of(blocks: list[tuple[int, int, int, int]], *, merge: bool) -> OperationPlan:
    columns = np.array(blocks, np.int64).reshape(-1, 4).T
    return plan_operations(columns[0], columns[1], columns[2], columns[3], merge=merge)


def covered(plan: OperationPlan) -> dict[tuple[int, int], int]:
    """(segment, file unit) -> memory unit, over all operations; a unit twice fails."""
    found: dict[tuple[int, int], int] = {}
    columns = (plan.segment, plan.offset, plan.address, plan.length)
    for segment, offset, address, length in zip(*(column.tolist() for column in columns), strict=True):
        assert 0 < length <= OPERATION_BYTES
        assert length % UNIT == 0
        for step in range(0, length, UNIT):
            assert (segment, offset + step) not in found, "read twice"
            found[segment, offset + step] = address + step
    return found


@settings(max_examples=60)
@given(blocks=layouts(), merge=st.booleans())
def test_every_byte_once_and_at_its_place(blocks: list[tuple[int, int, int, int]], merge: bool) -> None:
    plan = plan_of(blocks, merge=merge)
    wanted = {
        (segment, offset + step): address + step
        for segment, offset, address, length in blocks
        for step in range(0, length, UNIT)
    }
    assert covered(plan) == wanted


@given(blocks=layouts(), merge=st.booleans())
def test_operations_name_the_blocks_that_they_touch(blocks: list[tuple[int, int, int, int]], merge: bool) -> None:
    plan = plan_of(blocks, merge=merge)
    touching = [0] * len(blocks)
    for i in range(len(plan.length)):
        start, end = int(plan.address[i]), int(plan.address[i] + plan.length[i])
        mine = [b for b, (_, _, address, length) in enumerate(blocks) if address < end and address + length > start]
        assert mine == list(range(plan.first[i], plan.last[i] + 1))
        for block in mine:
            touching[block] += 1
    assert plan.per_block.tolist() == touching


@given(blocks=layouts())
def test_blocks_are_merged_only_where_file_and_memory_go_on(blocks: list[tuple[int, int, int, int]]) -> None:
    plan = plan_of(blocks, merge=True)
    for i in range(len(plan.length)):
        for before, after in zip(
            blocks[plan.first[i] : plan.last[i]], blocks[plan.first[i] + 1 : plan.last[i] + 1], strict=True
        ):
            assert after[0] == before[0]
            assert after[1] == before[1] + before[3]
            assert after[2] == before[2] + before[3]


@given(blocks=layouts())
def test_without_merging_every_operation_has_one_block(blocks: list[tuple[int, int, int, int]]) -> None:
    plan = plan_of(blocks, merge=False)
    assert (plan.first == plan.last).all()


def test_neighbours_become_one_request_and_large_blocks_several() -> None:
    small = [(0, 4096 * i, 4096 * i, 4096) for i in range(16)]
    assert len(plan_of(small, merge=True).length) == 1
    assert len(plan_of(small, merge=False).length) == 16
    large = [(0, 0, 0, 2 * OPERATION_BYTES + 512)]
    assert plan_of(large, merge=True).length.tolist() == [OPERATION_BYTES, OPERATION_BYTES, 512]
    assert plan_of([], merge=True).per_block.tolist() == []


def test_a_longer_request_gets_longer_reads_within_bounds() -> None:
    mib = 1 << 20
    assert [longest_read(total) for total in (1, mib, 127 * mib, 128 * mib, 256 * mib, 4096 * mib)] == [
        mib,
        mib,
        mib,
        2 * mib,
        4 * mib,
        4 * mib,
    ]
