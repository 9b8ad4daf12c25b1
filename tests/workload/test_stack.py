"""Stack distances against the definition: a list in order of last use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.workload.stack import FIRST, StackDistances, count_larger_before


def by_definition(blocks: list[int]) -> list[int]:
    """The place of every block in a list of distinct blocks, the last used first."""
    recent: list[int] = []
    found = []
    for block in blocks:
        found.append(recent.index(block) if block in recent else FIRST)
        if block in recent:
            recent.remove(block)
        recent.insert(0, block)
    return found


@given(
    blocks=st.lists(st.integers(0, 12), max_size=80),
    cuts=st.lists(st.integers(1, 9), min_size=80, max_size=80),
)
def test_distances_in_any_chunks_are_those_of_the_definition(blocks: list[int], cuts: list[int]) -> None:
    stack, found, at = StackDistances(), [], 0
    for cut in cuts:
        chunk = np.array(blocks[at : at + cut], dtype=np.uint64)
        found += stack.push(chunk, np.arange(at, at + len(chunk), dtype=float)).distance.tolist()
        at += cut
    assert found == by_definition(blocks)
    assert stack.distinct == len(set(blocks))


def test_ids_use_all_64_bits() -> None:
    top = (1 << 64) - 1
    blocks = np.array([top, 0, 1 << 63, top, 0], dtype=np.uint64)
    assert StackDistances().push(blocks, np.arange(5.0)).distance.tolist() == [FIRST, FIRST, FIRST, 2, 2]


def test_interval_is_the_time_since_the_last_touch_also_across_chunks() -> None:
    stack = StackDistances()
    first = stack.push(np.array([7, 8, 7], dtype=np.uint64), np.array([0.0, 1.0, 3.0])).interval_s
    later = stack.push(np.array([8, 7], dtype=np.uint64), np.array([11.0, 12.0])).interval_s
    assert np.isnan(first[:2]).all()
    assert first[2] == 3.0
    assert later.tolist() == [10.0, 9.0]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 64, 65, 257])
def test_count_larger_before(size: int) -> None:
    values = np.random.default_rng(size).permutation(size) * 3
    expected = [int((values[:i] > values[i]).sum()) for i in range(size)]
    assert count_larger_before(values.astype(np.int64)).tolist() == expected
