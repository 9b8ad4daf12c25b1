"""A host pool of SGLang as memory: the keys of its pages, and their bytes where they lie.

A page of a pool is one or more contiguous pieces (keys and values of multi-head attention: two). Each piece is a block
of the store, so nothing is copied or glued. What tells the pages of one pool from those of another (kind, layout,
shape, rank) is part of the key.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.buffers import address_of

LAYOUTS = ("page_first", "page_first_direct", "page_head")
"""Layouts whose pages are contiguous; SGLang's default, layer_first, scatters a page over all layers."""
TAG_BYTES = 16
RUN_BYTES = 1 << 20
"""Longest run of small pieces that are stored together: what a store reads at once."""
_SHAPE = (
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "size_per_token",
)


class HostPool:
    """One host pool. Views into its memory, which they keep alive; never copies."""

    def __init__(self, pool: Any, name: str, rank: object) -> None:
        """`rank` is what tells this pool's pages from those of other ranks, as JSON values; None where none does.

        Raises `ConfigError` for pools whose pages cannot be moved in place.
        """
        self.name = name
        self.pool = pool
        self.page_tokens = int(getattr(pool, "logical_page_size", 0) or pool.page_size)
        layout = str(getattr(pool, "layout", ""))
        if getattr(pool, "kv_buffer", False) is None:
            raise ConfigError(f"the host pool {name!r} ({type(pool).__name__}) holds no bytes: not supported")
        if layout not in LAYOUTS:
            raise ConfigError(
                f"the host pool {name!r} has layout {layout!r}, whose pages are not contiguous; start SGLang with "
                f"--hicache-mem-layout page_first_direct (or one of {', '.join(LAYOUTS)})"
            )
        self.piece_bytes = self._first_page()
        self._arenas = sorted((_array(tensor) for tensor in _tensors(pool)), key=address_of)
        self._views = [arena.data for arena in self._arenas]
        self._starts = np.array([address_of(arena) for arena in self._arenas], np.int64)
        self._lengths = np.array([len(arena) for arena in self._arenas], np.int64)
        self.shape = {
            "pool": [name, type(pool).__name__, layout, getattr(pool, "storage_format_tag", None)],
            "dtype": str(getattr(pool, "dtype", "")),
            "page": [self.page_tokens, self.piece_bytes],
            "sizes": {
                field: int(getattr(pool, field)) for field in _SHAPE if isinstance(getattr(pool, field, None), int)
            },
            "rank": rank,
        }
        self._tag = hashlib.sha256(json.dumps(self.shape, sort_keys=True).encode()).digest()[:TAG_BYTES]

    @property
    def arenas(self) -> list[npt.NDArray[np.uint8]]:
        """All memory of the pool, to be registered with a store."""
        return self._arenas

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(self.piece_bytes)

    def keys(self, pages: Sequence[str]) -> list[bytes]:
        """Keys of the blocks of these pages, 49 bytes each, in an order of the pool's: the blocks of `buffers`."""
        pieces = [self._tag + bytes([piece]) for piece in range(len(self.piece_bytes))]
        digests = [hashlib.blake2b(page.encode(), digest_size=32).digest() for page in pages]
        page_of, piece_of = self._order(len(pages))
        return [digests[page] + pieces[piece] for page, piece in zip(page_of.tolist(), piece_of.tolist(), strict=True)]

    def buffers(self, indices: Any, pages: int) -> list[memoryview]:
        """Memory of the blocks of `pages` pages at these token numbers, in the order of `keys`.

        Raises `MisuseError` when the pool gives other pieces than it has.
        """
        if indices is None or len(indices) != pages * self.page_tokens:
            found = "none" if indices is None else len(indices)
            raise MisuseError(f"{pages} pages of {self.page_tokens} tokens need as many indices, got {found}")
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        if list(sizes) != self.piece_bytes * pages:
            raise MisuseError(f"the host pool {self.name!r} gave other pieces than {self.piece_bytes} a page")
        page_of, piece_of = self._order(pages)
        addresses = np.array(pointers, np.int64).reshape(pages, -1)[page_of, piece_of]
        numbers = np.searchsorted(self._starts, addresses, "right") - 1
        offsets, lengths = addresses - self._starts[numbers], np.array(self.piece_bytes)[piece_of]
        if (numbers < 0).any() or (offsets + lengths > self._lengths[numbers]).any():
            raise MisuseError(f"the host pool {self.name!r} gave memory that is not its own")
        blocks = zip(numbers.tolist(), offsets.tolist(), lengths.tolist(), strict=True)
        return [self._views[number][at : at + length] for number, at, length in blocks]

    def whole(self, good: Sequence[bool] | npt.NDArray[np.bool_], pages: int) -> list[bool]:
        """For each page whether all its blocks are good, which are in the order of `keys`."""
        pieces = np.zeros((pages, len(self.piece_bytes)), np.bool_)
        pieces[self._order(pages)] = good
        found: list[bool] = np.logical_and.reduce(pieces, axis=1).tolist()
        return found

    def _order(self, pages: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Page and piece of each block of so many pages, shape (blocks,) each.

        The first pieces of some pages come before their second ones: pages that follow each other in memory are then
        written, and read, in runs of `RUN_BYTES`. Not of all pages: a page of which one piece is evicted is lost.
        """
        together = max(1, RUN_BYTES // max(self.piece_bytes))
        page, piece = np.divmod(np.arange(pages * len(self.piece_bytes)), len(self.piece_bytes))
        order = np.lexsort((page, piece, page // together))
        return page[order], piece[order]

    def _first_page(self) -> list[int]:
        """Bytes of the pieces of a page."""
        torch: Any = importlib.import_module("torch")
        try:
            meta = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (ValueError, NotImplementedError, AttributeError) as error:
            raise ConfigError(f"the host pool {self.name!r} does not give its pages in place: {error}") from error
        return [int(size) for size in meta[1]]


def _tensors(pool: Any) -> list[Any]:
    """The tensors that a pool's pages lie in."""
    whole = getattr(pool, "kv_buffer", None)
    if whole is not None and not isinstance(whole, (list, tuple)) and whole.is_contiguous():
        return [whole]
    parts = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else whole
    return [tensor for tensor in parts or () if tensor is not None and tensor.numel()]


def _array(tensor: Any) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, shape (bytes,), as long as the array lives."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError("a host pool whose memory is not contiguous host memory is not supported")
    found: npt.NDArray[np.uint8] = tensor.view(-1).view(importlib.import_module("torch").uint8).numpy()
    return found
