"""The blocks of the tests themselves: no two are alike anywhere, and every process makes the same."""

from __future__ import annotations

import hashlib
import zlib

import pytest

from rewarm.testing import make_keys, payload
from rewarm.testing.payload import CHUNK_BYTES

LONG = 2 * CHUNK_BYTES + 12_345


@pytest.mark.parametrize("size", [0, 1, 31, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_block_is_a_prefix_of_a_longer_one(size: int) -> None:
    (key,) = make_keys(1)
    assert payload(key, size) == payload(key, LONG)[:size]


def test_blocks_differ_in_every_32_bytes_and_within_themselves() -> None:
    one, other = (payload(key, LONG) for key in make_keys(2))
    pieces = [{block[at : at + 32] for at in range(0, LONG - 31, 32)} for block in (one, other)]
    assert len(pieces[0] | pieces[1]) == 2 * (LONG // 32)
    assert len(zlib.compress(one)) > LONG


def test_every_process_makes_the_same() -> None:
    assert hashlib.sha256(payload(b"a key", LONG)).hexdigest()[:16] == "34d4ec44488b5344"
