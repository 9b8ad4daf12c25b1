"""Checksums of an I/O thread beside a busy interpreter: how long may the lock be kept, and when.

xxhash gives the interpreter lock up for more than 64 KiB. Beside a thread that never waits, taking it back costs
a switch interval (5 ms), a hundred times the checksum of 1 MiB. So a `Hasher` notices that it lost the lock, and then
hashes in slices too small for it to be given up: bytes are verified at the same speed, while the other thread pays for
the time that they take. Where nobody fights for the lock it is given up as usual. One thread each; results are those
of `layout.digest`.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import xxhash

from rewarm.store.layout import digest

SLICE_BYTES = 64 << 10
"""Up to this xxhash keeps the lock (version 4; earlier ones up to 100 KiB)."""

LOST_S = 0.002
"""A checksum that takes this much longer than it should has waited for the lock, or the thread for a processor."""

SLOWEST_BYTES_PER_S = 2e9
"""No processor that we know hashes slower than this."""

KEPT_BYTES = 1 << 30
"""Bytes hashed in slices after the lock was lost; then it is tried once again without them."""


class Hasher:
    """XXH3-128 of blocks, for one thread."""

    def __init__(self) -> None:
        self._kept_bytes = 0

    def digest(self, data: npt.NDArray[np.uint8]) -> bytes:
        """XXH3-128 of contiguous bytes, shape (bytes,); 16 bytes."""
        size = len(data)
        if size <= SLICE_BYTES:
            return digest(data)
        if self._kept_bytes > 0:
            self._kept_bytes -= size
            return _in_slices(data)
        start_s = time.monotonic()
        found = digest(data)
        if time.monotonic() - start_s > LOST_S + size / SLOWEST_BYTES_PER_S:
            self._kept_bytes = KEPT_BYTES
        return found


def _in_slices(data: npt.NDArray[np.uint8]) -> bytes:
    state, view = xxhash.xxh3_128(), data.data
    for start in range(0, len(data), SLICE_BYTES):
        state.update(view[start : start + SLICE_BYTES])
    return state.digest()
