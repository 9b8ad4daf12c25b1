"""Borrowed memory: addresses are where the bytes are, what cannot be borrowed is refused; bounce memory is bounded."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewarm.errors import MisuseError
from rewarm.store.buffers import Borrowed, BouncePool, address_of, aligned_region, borrow, hold
from rewarm.store.layout import BLOCK_BYTES_MAX, PAGE, pages


def bytes_at(borrowed: Borrowed, i: int) -> bytes:
    """What really lies at an address."""
    return ctypes.string_at(int(borrowed.addresses[i]), int(borrowed.lengths[i]))


def test_addresses_are_where_the_bytes_are() -> None:
    buffers = [bytearray(b"first"), memoryview(b"..second..")[2:8], np.arange(3, dtype=np.float64)]
    borrowed = borrow(buffers, 3, writable=False)
    assert [bytes_at(borrowed, i) for i in range(3)] == [b"first", b"second", np.arange(3.0).tobytes()]
    assert [bytes(view) for view in borrowed.views] == [bytes_at(borrowed, i) for i in range(3)]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(4, 6),
        np.arange(48, dtype=np.uint8).reshape(4, 12)[:, 3:9],
        np.arange(48, dtype=np.uint8).reshape(8, 6)[::2],
        np.arange(24, dtype=np.uint8).reshape(4, 6)[::-1],
        np.arange(24, dtype=np.float32).reshape(4, 2, 3),
        np.broadcast_to(np.arange(6, dtype=np.uint8), (4, 6)),
    ],
)
def test_rows_of_arrays_of_any_stride(array: np.ndarray) -> None:
    borrowed = borrow(array, 4, writable=False)
    assert [bytes_at(borrowed, i) for i in range(4)] == [row.tobytes() for row in array]
    assert [bytes(view) for view in borrowed.views] == [row.tobytes() for row in array]


def test_borrowed_memory_cannot_move_or_be_freed() -> None:
    buffer = bytearray(100)
    held, _ = hold([buffer], 1)
    with pytest.raises(BufferError):
        buffer.clear()
    borrowed = borrow(held, 1, writable=True)
    del held
    with pytest.raises(BufferError):
        buffer.clear()
    del borrowed
    buffer.clear()


REFUSED = {
    "too few": ([bytearray(8)], 2),
    "too many": ([bytearray(8)] * 3, 2),
    "no buffers": ([1, 2], 2),
    "text": (["a", "b"], 2),
    "scattered": ([memoryview(bytearray(16))[::2], bytearray(8)], 2),
    "empty": ([bytearray(8), bytearray()], 2),
    "one row": (np.zeros(2, np.uint8), 2),
    "rows of nothing": (np.zeros((2, 0), np.uint8), 2),
    "scattered rows": (np.zeros((2, 16), np.uint8)[:, ::2], 2),
    "columns": (np.zeros((8, 2), np.uint8).T, 2),
    "objects": (np.array([[None, None], [None, None]]), 2),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("writable", [True, False])
def test_what_cannot_be_borrowed_is_refused(why: str, writable: bool) -> None:
    buffers, count = REFUSED[why]
    with pytest.raises(MisuseError):
        borrow(buffers, count, writable=writable)


def test_only_sources_may_be_read_only() -> None:
    fixed = np.zeros((2, 8), np.uint8)
    fixed.flags.writeable = False
    for buffers in ([bytes(8), bytes(8)], fixed, [bytearray(8), memoryview(bytearray(8)).toreadonly()]):
        borrow(buffers, 2, writable=False)
        with pytest.raises(MisuseError, match="read-only"):
            borrow(buffers, 2, writable=True)


def test_a_block_has_at_most_a_gibibyte() -> None:
    large = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1, BLOCK_BYTES_MAX + 1), (0, 1))
    with pytest.raises(MisuseError, match=str(BLOCK_BYTES_MAX)):
        hold(large, 1)


def test_no_buffers_are_fine() -> None:
    for nothing in ([], np.zeros((0, 8), np.uint8)):
        assert len(borrow(nothing, 0, writable=True).lengths) == 0


@given(count=st.integers(0, 3 * PAGE))
def test_regions_start_on_a_page(count: int) -> None:
    region = aligned_region(count)
    assert len(region) == count
    assert count == 0 or address_of(region) % PAGE == 0
    assert not region.any()


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(1, 6 * PAGE), max_size=40), picks=st.lists(st.integers(0, 9), max_size=40))
def test_bounce_memory_is_bounded_and_never_given_twice(sizes: list[int], picks: list[int]) -> None:
    limit = 8 * PAGE
    pool, held = BouncePool(limit), []
    for size in sizes:
        region = pool.take(size)
        used = sum(len(one) for one in held)
        if region is None:
            assert used, "one alone always gets what it wants"
            assert used + pages(size) > limit
        else:
            assert len(region) == pages(size)
            assert address_of(region) % PAGE == 0
            held.append(region)
        spans = sorted((address_of(one), address_of(one) + len(one)) for one in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        if held and picks:
            pool.give(held.pop(picks.pop() % len(held)))
    for region in held:
        pool.give(region)
    assert pool.take(limit) is not None


def test_bounce_memory_larger_than_the_limit_is_lent_alone() -> None:
    pool = BouncePool(2 * PAGE)
    huge = pool.take(10 * PAGE)
    assert huge is not None
    assert pool.take(1) is None
    pool.give(huge)
    assert pool.take(PAGE) is not None
