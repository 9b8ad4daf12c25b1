"""Any C-contiguous memory of the caller is good enough; nothing around it is touched; misuse is refused whole."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rewarm.errors import MisuseError
from rewarm.store.contract import Outcome
from rewarm.testing.kit.base import BLOCK_BYTES, UNTOUCHED, StoreKit, blocks_of, destinations, finish, load, save
from rewarm.testing.payload import make_keys, payload

ODD_SIZE = 10_007
GUARD = 4099
"""Bytes watched on both sides of a destination: more than a page, and no multiple of anything."""


def _mapped(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)


def _odd_slice(size: int) -> memoryview:
    return memoryview(bytearray(size + 16))[3 : size + 3]


def _row(size: int) -> Any:
    return np.zeros((3, size), dtype=np.uint8)[1]


def _ctypes(size: int) -> Any:
    return (ctypes.c_char * size)()


WRITABLE: dict[str, Callable[[int], Any]] = {
    "bytearray": bytearray,
    "odd slice": _odd_slice,
    "mmap": _mapped,
    "numpy row": _row,
    "float16": lambda size: np.zeros(size // 2, dtype=np.float16),
    "three axes": lambda size: np.zeros((2, size // 8, 4), dtype=np.uint8),
    "array": lambda size: array.array("H", bytes(size)),
    "ctypes": _ctypes,
}

BAD_BUFFERS: dict[str, Callable[[], object]] = {
    "strided": lambda: np.zeros(2 * BLOCK_BYTES, dtype=np.uint8)[::2],
    "column order": lambda: np.zeros((256, 256), dtype=np.uint8).T[:, ::2],
    "empty": lambda: bytearray(0),
    "text": lambda: "x" * BLOCK_BYTES,
    "number": lambda: BLOCK_BYTES,
    "nothing": lambda: None,
}


class BufferTests(StoreKit):
    """The caller's memory."""

    @pytest.mark.parametrize("kind", WRITABLE)
    def test_any_memory_is_a_destination_and_a_source(self, kind: str) -> None:
        store, keys = self.open(), make_keys(3, kind)
        sources = [WRITABLE[kind](BLOCK_BYTES) for _ in keys]
        for key, source in zip(keys, sources, strict=True):
            memoryview(source).cast("B")[:] = payload(key, BLOCK_BYTES)
        assert finish(store.save(keys, sources)) == [True] * 3
        buffers = [WRITABLE[kind](BLOCK_BYTES) for _ in keys]
        assert finish(store.load(keys, buffers)) == [True] * 3
        assert [memoryview(buffer).cast("B") for buffer in buffers] == blocks_of(keys)

    def test_read_only_memory_is_a_source(self) -> None:
        store, keys = self.open(), make_keys(3)
        frozen = np.frombuffer(payload(keys[2], BLOCK_BYTES), dtype=np.uint8)
        sources = [payload(keys[0], BLOCK_BYTES), memoryview(payload(keys[1], BLOCK_BYTES)).toreadonly(), frozen]
        assert finish(store.save(keys, sources)) == [True] * 3
        assert load(store, keys) == [Outcome.HIT] * 3

    @pytest.mark.parametrize("size", [BLOCK_BYTES, ODD_SIZE])
    def test_a_batch_is_a_two_dimensional_array(self, size: int) -> None:
        store, keys = self.open(), make_keys(6)
        sources = np.stack([np.frombuffer(block, dtype=np.uint8) for block in blocks_of(keys, size)])
        assert finish(store.save(keys, sources)) == [True] * 6
        buffers = destinations(6, size)
        assert finish(store.load(keys, buffers)) == [True] * 6
        assert np.array_equal(buffers, sources)

    def test_rows_of_a_wider_array(self) -> None:
        store, keys = self.open(), make_keys(6)
        save(store, keys, ODD_SIZE)
        wide = destinations(12, ODD_SIZE + 100)
        assert finish(store.load(keys, list(wide[::2, :ODD_SIZE]))) == [True] * 6
        assert [row.tobytes() for row in wide[::2, :ODD_SIZE]] == blocks_of(keys, ODD_SIZE)
        assert (wide[1::2] == UNTOUCHED).all()
        assert (wide[:, ODD_SIZE:] == UNTOUCHED).all()

    @pytest.mark.parametrize("size", [1, 511, 4096, 4097, ODD_SIZE, BLOCK_BYTES])
    @pytest.mark.parametrize("shift", [0, 1, 511])
    def test_memory_around_a_destination_is_untouched(self, size: int, shift: int) -> None:
        store, keys = self.open(), make_keys(4)
        save(store, keys, size)
        stride = size + 2 * GUARD
        canvas = np.full(4 * stride + shift, UNTOUCHED, dtype=np.uint8)
        spans = [slice(shift + i * stride + GUARD, shift + i * stride + GUARD + size) for i in range(4)]
        assert finish(store.load(keys, [canvas[span] for span in spans])) == [True] * 4
        for key, span in zip(keys, spans, strict=True):
            assert canvas[span].tobytes() == payload(key, size)
            canvas[span] = UNTOUCHED
        assert (canvas == UNTOUCHED).all()

    def test_sources_are_not_changed(self) -> None:
        store, keys = self.open(), make_keys(4)
        sources = [bytearray(block) for block in blocks_of(keys, ODD_SIZE)]
        finish(store.save(keys, sources))
        assert sources == blocks_of(keys, ODD_SIZE)

    def test_a_released_source_may_be_reused(self) -> None:
        store, keys = self.open(), make_keys(8)
        source = bytearray(BLOCK_BYTES)
        for key in keys:
            source[:] = payload(key, BLOCK_BYTES)
            assert finish(store.save([key], [source])) == [True]
        source[:] = bytes(BLOCK_BYTES)
        assert load(store, keys) == [Outcome.HIT] * 8

    def test_the_caller_may_drop_its_references(self) -> None:
        store, keys = self.open(), make_keys(32)
        saving = store.save(keys, blocks_of(keys))
        gc.collect()
        assert finish(saving) == [True] * 32
        loading = store.load(keys, [bytearray(BLOCK_BYTES) for _ in keys])
        gc.collect()
        assert finish(loading) == [True] * 32
        assert load(store, keys) == [Outcome.HIT] * 32

    @pytest.mark.parametrize("kind", BAD_BUFFERS)
    @pytest.mark.parametrize("verb", ["load", "save"])
    def test_what_is_not_contiguous_memory_is_refused(self, verb: str, kind: str) -> None:
        store, keys = self.open(), make_keys(2)
        good = bytearray(payload(keys[0], BLOCK_BYTES))
        with pytest.raises(MisuseError):
            getattr(store, verb)(keys, [good, BAD_BUFFERS[kind]()])
        assert good == payload(keys[0], BLOCK_BYTES)
        assert not store.lookup(keys).mask.any(), "a refused batch must do nothing"

    def test_a_read_only_destination_is_refused(self) -> None:
        store, keys = self.open(), make_keys(2)
        save(store, keys)
        frozen = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        frozen.flags.writeable = False
        for bad in (bytes(BLOCK_BYTES), memoryview(bytearray(BLOCK_BYTES)).toreadonly(), frozen):
            good = bytearray(BLOCK_BYTES)
            with pytest.raises(MisuseError):
                store.load(keys, [good, bad])
            assert good == bytes(BLOCK_BYTES), "a refused batch must do nothing"

    @pytest.mark.parametrize("buffers", [1, 3])
    @pytest.mark.parametrize("verb", ["load", "save"])
    def test_one_buffer_per_key(self, verb: str, buffers: int) -> None:
        store, keys = self.open(), make_keys(2)
        for given in (destinations(buffers), list(destinations(buffers))):
            with pytest.raises(MisuseError):
                getattr(store, verb)(keys, given)
        assert not store.lookup(keys).mask.any()
