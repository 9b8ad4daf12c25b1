"""Contents of blocks: distinct in every sector, incompressible, and a wrong byte is seen wherever it is."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.bench.payload import SECTOR_BYTES, Payload

LARGE = (1 << 20) + 16 * SECTOR_BYTES
"""More than the base of 1 MiB, so that some of it is used twice within one block."""


def block(payload: Payload, number: int, size: int) -> np.ndarray:
    out = np.zeros(size, np.uint8)
    payload.fill(number, out)
    return out


def test_every_sector_of_many_blocks_is_another_one() -> None:
    payload = Payload(1, LARGE)
    blocks = [block(payload, number, LARGE).reshape(-1, SECTOR_BYTES) for number in range(4)]
    assert len({sector.tobytes() for rows in blocks for sector in rows}) == 4 * LARGE // SECTOR_BYTES


def test_words_do_not_repeat_either_so_a_long_window_finds_nothing() -> None:
    payload = Payload(1, LARGE)
    words = np.concatenate([block(payload, number, LARGE).view(np.uint64) for number in range(2)])
    assert len(np.unique(words)) == len(words)


def test_blocks_do_not_compress() -> None:
    data = block(Payload(1, LARGE), 5, LARGE).tobytes()
    assert len(zlib.compress(data, 9)) >= len(data)


def test_contents_follow_from_seed_and_number() -> None:
    one = block(Payload(1, LARGE), 7, LARGE)
    assert (one == block(Payload(1, LARGE), 7, LARGE)).all()
    assert not (one == block(Payload(2, LARGE), 7, LARGE)).all()
    assert not (one == block(Payload(1, LARGE), 8, LARGE)).all()


@given(size=st.integers(1, 3 * SECTOR_BYTES + 8), number=st.integers(0, 2**40), data=st.data())
def test_any_flipped_bit_is_seen(size: int, number: int, data: st.DataObject) -> None:
    payload = Payload(3, 3 * SECTOR_BYTES + 8)
    held = block(payload, number, size)
    assert payload.matches(number, held)
    held[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not payload.matches(number, held)


def test_the_sampled_comparison_tells_sectors_apart() -> None:
    payload = Payload(1, LARGE)
    held = block(payload, 7, LARGE)
    assert payload.matches_sampled(7, held)
    assert not payload.matches_sampled(6, held)
    held[5 * SECTOR_BYTES : 6 * SECTOR_BYTES] = held[4 * SECTOR_BYTES : 5 * SECTOR_BYTES].copy()
    assert not payload.matches_sampled(7, held)


def test_a_block_has_a_byte() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Payload(1, 0)
