"""Registered arenas: pinned where the device can, accepted everywhere, never needed for the right bytes."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from rewarm.errors import MisuseError
from rewarm.store.contract import Outcome
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

SIZE = 65536
BLOCKS = 16


def arena_of(blocks: int) -> np.ndarray:
    """Page-aligned memory, shape (blocks, SIZE)."""
    return np.frombuffer(mmap.mmap(-1, blocks * SIZE), np.uint8).reshape(blocks, SIZE)


@pytest.mark.parametrize("device", ["uring", "aio", "threads"])
def test_blocks_go_through_a_registered_arena(tmp_path: Path, device: str) -> None:
    keys = make_keys(BLOCKS)
    arena = arena_of(2 * BLOCKS)
    with open_store(f"file://{tmp_path}?capacity=64MiB&device={device}") as store:
        pinned = store.register(arena)
        assert pinned == (arena.nbytes if device == "uring" else 0)
        assert store.stats().registered_bytes == pinned
        for row, key in zip(arena[:BLOCKS], keys, strict=True):
            row[:] = np.frombuffer(payload(key, SIZE), np.uint8)
        assert all(store.save(keys, arena[:BLOCKS]).wait())
        assert all(store.load(keys, arena[BLOCKS:]).wait())
        assert (arena[:BLOCKS] == arena[BLOCKS:]).all()
        outside = arena_of(BLOCKS)
        assert store.load(keys, outside).wait() == [True] * BLOCKS
        assert (outside == arena[:BLOCKS]).all()


def test_an_arena_stays_mapped_until_the_store_is_closed(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, SIZE)
    store = open_store(f"file://{tmp_path}?capacity=64MiB")
    store.register(memory)
    with pytest.raises(BufferError):
        memory.close()
    store.close()
    memory.close()


def test_registering_twice_or_what_cannot_be_written_is_misuse(tmp_path: Path) -> None:
    arena = arena_of(1)
    with open_store(f"file://{tmp_path}?capacity=64MiB&device=uring") as store:
        store.register(arena)
        for wrong in (arena, b"read-only", np.zeros((4, 4), np.uint8)[:, ::2], bytearray(), 7):
            with pytest.raises(MisuseError):
                store.register(wrong)
        key = make_keys(1)
        assert store.save(key, arena).wait() == [True], "a refused arena ends nothing"
        assert store.load(key, arena).outcomes in ([None], [Outcome.HIT])
