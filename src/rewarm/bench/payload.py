"""Block contents for measurements: incompressible, distinct in every sector, and checkable without keeping a copy.

Every 8-byte word of a block is a word of one random base, XORed with a stamp that belongs to its sector alone. Two
sectors share no content, neither as a whole (a deduplicating array gains nothing) nor in parts (a compressor with a
long window gains nothing), and making or checking a block costs one pass over memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SECTOR_BYTES = 4096
_WORDS = SECTOR_BYTES // 8
_BASE_SECTORS = 256
"""1 MiB of base: it stays in the processor's cache, so a pass costs the memory of the block only."""

Bytes = npt.NDArray[np.uint8]
_Words = npt.NDArray[np.uint64]


class Payload:
    """Contents of blocks of up to `block_bytes_max`, told apart by their number. Safe to use from several threads."""

    def __init__(self, seed: int, block_bytes_max: int) -> None:
        if block_bytes_max < 1:
            raise ValueError(f"a block has at least one byte, got {block_bytes_max}")
        self._sectors_max = -(-block_bytes_max // SECTOR_BYTES)
        random = np.random.default_rng(seed)
        self._base: _Words = random.integers(0, 2**64, size=(_BASE_SECTORS, _WORDS), dtype=np.uint64)
        self._offset = random.integers(0, 2**64, dtype=np.uint64)

    def fill(self, number: int, out: Bytes) -> None:
        """Write the contents of block `number` into `out`, shape (bytes,)."""
        stamps = self._stamps(number, len(out))
        words, tail = _split(out)
        for first in range(0, len(words), _BASE_SECTORS):
            part = words[first : first + _BASE_SECTORS]
            np.bitwise_xor(self._base[: len(part)], stamps[first : first + len(part), None], out=part)
        if len(tail):
            tail[:] = self._tail(stamps, len(tail))

    def matches(self, number: int, data: Bytes) -> bool:
        """Whether every byte of `data` is that of block `number`."""
        stamps = self._stamps(number, len(data))
        words, tail = _split(data)
        for first in range(0, len(words), _BASE_SECTORS):
            part = words[first : first + _BASE_SECTORS]
            if ((part ^ self._base[: len(part)]) != stamps[first : first + len(part), None]).any():
                return False
        return not len(tail) or bool((tail == self._tail(stamps, len(tail))).all())

    def matches_sampled(self, number: int, data: Bytes) -> bool:
        """Whether the first 8 bytes of every whole sector of `data` are those of block `number`: a 64th of the memory.

        It tells every sector of the run from every other; it does not see a bit flipped inside one.
        """
        words, _ = _split(data)
        stamps = self._stamps(number, len(data))[: len(words)]
        expected = self._base[np.arange(len(words)) % _BASE_SECTORS, 0] ^ stamps
        return bool((words[:, 0] == expected).all())

    def _stamps(self, number: int, length: int) -> _Words:
        """One stamp per sector, never the same twice: a bijection of the sector's running number (splitmix64)."""
        first = number * self._sectors_max
        value = np.arange(first, first - (-length // SECTOR_BYTES), dtype=np.uint64) + self._offset
        value *= np.uint64(0x9E3779B97F4A7C15)  # an odd factor is a bijection modulo 2**64
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: _Words = value ^ (value >> np.uint64(31))
        return mixed

    def _tail(self, stamps: _Words, length: int) -> Bytes:
        """The last sector of a block, cut to the `length` bytes that it has."""
        sector: _Words = self._base[(len(stamps) - 1) % _BASE_SECTORS] ^ stamps[-1]
        return sector.view(np.uint8)[:length]


def _split(data: Bytes) -> tuple[_Words, Bytes]:
    """The whole sectors of a block as words, shape (sectors, 512), and the bytes after them."""
    whole = len(data) // SECTOR_BYTES
    return data[: whole * SECTOR_BYTES].view(np.uint64).reshape(whole, _WORDS), data[whole * SECTOR_BYTES :]
