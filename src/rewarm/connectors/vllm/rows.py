"""The primary region as Rewarm sees it: rows of equal size, each the KV of one chunk of tokens on all ranks.

A row is `|rank 0|rank 1|..|padding|`. Where every rank holds the same bytes (multi-head latent attention without a
single-copy layout), only the first rank's part is stored, and copied to the others after it is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError


class Rows:
    """The rows of one region. Views into it, never copies; the region must outlive every transfer from or to it."""

    def __init__(self, region: memoryview, *, copies: int = 1, part_bytes: int | None = None) -> None:
        """`region` has shape (rows, bytes). With `copies` above 1 a row begins with that many equal parts of
        `part_bytes`. Raises `ConfigError` when the parts do not fit."""
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(region.cast("B"), np.uint8).reshape(region.shape)
        self.count: int = self._bytes.shape[0]
        self.row_bytes: int = self._bytes.shape[1]
        self._copies = copies
        self.block_bytes = self.row_bytes if copies == 1 or part_bytes is None else part_bytes
        if self.block_bytes * copies > self.row_bytes and copies > 1:
            raise ConfigError(f"{copies} copies of {self.block_bytes} bytes do not fit a row of {self.row_bytes}")
        self._region = region

    @property
    def region(self) -> memoryview:
        """All rows, to be registered with a store."""
        return self._region

    @property
    def replicated(self) -> bool:
        """True when a restored row must be completed by `replicate`."""
        return self._copies > 1

    def blocks(self, rows: Iterable[int]) -> list[npt.NDArray[np.uint8]]:
        """What is stored of these rows, as views of shape (block_bytes,)."""
        if not self.replicated:
            return [self._bytes[row] for row in rows]
        return [self._bytes[row, : self.block_bytes] for row in rows]

    def replicate(self, rows: Sequence[int]) -> None:
        """Copy the first rank's part of these rows to the other ranks."""
        for row in rows:
            parts = self._bytes[row, : self.block_bytes * self._copies].reshape(self._copies, self.block_bytes)
            parts[1:] = parts[0]

    def release(self) -> None:
        """Let go of the region, so that its owner can unmap it."""
        self._bytes = np.empty((0, self.row_bytes), np.uint8)
