"""Memory: addresses of the caller's buffers, aligned regions of our own, a bounded pool of bounce memory."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError
from rewarm.store.layout import BLOCK_BYTES_MAX, pages

BOUNCE_BYTES = 64 << 20
"""Bounce memory of one direction: enough for a full queue of unaligned blocks, bounded because it is ours to pay."""


class Borrowed(msgspec.Struct, frozen=True, eq=False):
    """The caller's buffers for one transfer: exports that keep them mapped, their addresses and sizes in bytes."""

    views: list[npt.NDArray[np.uint8]]
    addresses: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


Held = Sequence[memoryview] | npt.NDArray[Any]
"""Buffers whose memory can neither move nor be freed."""


def hold(buffers: Sequence[Any] | npt.NDArray[Any], count: int) -> tuple[Held, list[int]]:
    """The buffers, held in place, and the bytes of each.

    Raises `MisuseError` when there are not `count`, or one is no contiguous buffer, empty or too large.
    """
    if len(buffers) != count:
        raise MisuseError(f"{count} keys but {len(buffers)} buffers")
    held: Held
    if isinstance(buffers, np.ndarray):
        if buffers.ndim < 2:
            raise MisuseError(f"an array of buffers has a first axis of keys, got shape {buffers.shape}")
        if buffers.dtype.hasobject:
            raise MisuseError("an array of Python objects is no memory of a block")
        if count and not buffers[0].flags.c_contiguous:
            raise MisuseError("each block of an array must be contiguous memory")
        held, sizes = buffers, [buffers.nbytes // max(count, 1)] * count
    else:
        try:
            held = [memoryview(buffer) for buffer in buffers]
        except (TypeError, ValueError, BufferError) as error:
            raise MisuseError(f"buffers must have the buffer protocol: {error}") from None
        if not all(view.c_contiguous for view in held):
            raise MisuseError("buffers must be contiguous memory")
        sizes = [view.nbytes for view in held]
    for size in sizes:
        if not 0 < size <= BLOCK_BYTES_MAX:
            raise MisuseError(f"a block has 1 to {BLOCK_BYTES_MAX} bytes, got {size}")
    return held, sizes


def hold_writable(buffers: Sequence[Any] | npt.NDArray[Any], count: int) -> tuple[Held, list[int]]:
    """`hold` for memory that is to be written. Raises `MisuseError` for what is read-only, too."""
    held, sizes = hold(buffers, count)
    if isinstance(held, np.ndarray):
        if not held.flags.writeable:
            raise MisuseError("load needs writable buffers; this array is read-only")
    elif any(view.readonly for view in held):
        raise MisuseError("load needs writable buffers; one is read-only")
    return held, sizes


def borrow(buffers: Sequence[Any] | npt.NDArray[Any], count: int, *, writable: bool) -> Borrowed:
    """Take the buffers of a transfer. Raises `MisuseError` for read-only, scattered or missing memory."""
    held, sizes = hold_writable(buffers, count) if writable else hold(buffers, count)
    lengths = np.array(sizes, np.int64)
    if isinstance(held, np.ndarray):
        plain = held.ndim == 2 and held.dtype == np.uint8
        flat = list(held) if plain else [row.reshape(-1).view(np.uint8) for row in held]
        stride = held.strides[0] if count > 1 else 0
        addresses = address_of(held) + stride * np.arange(count, dtype=np.int64)
        return Borrowed(flat, addresses, lengths)
    views = [np.frombuffer(view, np.uint8) for view in held]
    if writable:  # four times as fast as asking numpy, which counts for thousands of small blocks
        addresses = np.array([ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in held], np.int64)
    else:
        addresses = np.array([address_of(view) for view in views], np.int64)
    return Borrowed(views, addresses, lengths)


def export(arena: Any) -> npt.NDArray[np.uint8]:
    """A writable arena's bytes, shape (bytes,), exported as long as the array lives. Raises `MisuseError`."""
    try:
        view = memoryview(arena)
    except TypeError as error:
        raise MisuseError(f"an arena must have the buffer protocol: {error}") from None
    if view.readonly or not view.c_contiguous or not view.nbytes:
        raise MisuseError("an arena is writable contiguous memory of at least one byte")
    return np.frombuffer(view, np.uint8)


def aligned_region(count: int) -> npt.NDArray[np.uint8]:
    """Zeroed private memory that starts on a page, shape (count,); freed with its last reference."""
    region = mmap.mmap(-1, max(pages(count), 1))
    return np.frombuffer(region, np.uint8, count)


class BouncePool:
    """Bounded memory of our own for blocks that cannot be moved in place. Used by one thread, counted for all."""

    def __init__(self, limit: int = BOUNCE_BYTES) -> None:
        self._limit = limit
        self._used = 0
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._idle = 0
        self._lock = threading.Lock()

    def take(self, count: int) -> npt.NDArray[np.uint8] | None:
        """Aligned memory of whole pages for `count` bytes; None while the limit is used up by others."""
        size = pages(count)
        with self._lock:
            if self._used and self._used + size > self._limit:
                return None
            self._used += size
            waiting = self._free.get(size)
            if waiting:
                self._idle -= size
                return waiting.pop()
            if self._used + self._idle > self._limit:
                self._free.clear()
                self._idle = 0
        return aligned_region(size)

    def give(self, region: npt.NDArray[np.uint8]) -> None:
        """Return memory that no request can write to any more."""
        size = len(region)
        with self._lock:
            self._used -= size
            if self._used + self._idle + size <= self._limit:
                self._free.setdefault(size, []).append(region)
                self._idle += size
