"""Keys and blocks for tests: what a block holds follows from its key, so any process can tell a wrong byte.

Blocks are incompressible and differ from key to key in every 32 bytes, so a block that came back under another key,
shifted, or stitched together from two blocks is never taken for right. They cost a copy and little more: one random
megabyte, the same for all, is combined with a digest of the key, another one in each megabyte of a block.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32
CHUNK_BYTES = 1 << 20
PAGE_BYTES = 4096


@functools.cache
def _noise() -> npt.NDArray[np.uint64]:
    """Shape (pages of a chunk, words of a page)."""
    words = np.random.Philox(key=0).random_raw(CHUNK_BYTES // 8)
    return np.asarray(words, np.uint64).reshape(-1, PAGE_BYTES // 8)


def payload(key: bytes, size: int) -> bytes:
    """The `size` bytes that belong to `key`: the same in every process, and a prefix of those of a larger size."""
    noise, parts = _noise(), []
    for number in range(-(-size // CHUNK_BYTES)):
        count = min(size - number * CHUNK_BYTES, CHUNK_BYTES)
        digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES, salt=number.to_bytes(16, "little")).digest()
        mask = np.frombuffer(digest * (PAGE_BYTES // DIGEST_BYTES), np.uint64)
        mixed = noise[: -(-count // PAGE_BYTES)] ^ mask
        parts.append(mixed.view(np.uint8).reshape(-1)[:count].tobytes())
    return parts[0] if len(parts) == 1 else b"".join(parts)


def make_keys(count: int, tag: str = "", *, size: int = 32) -> list[bytes]:
    """`count` distinct keys of `size` bytes (8 to 64); other tags give other keys."""
    return [hashlib.blake2b(f"{tag}/{index}".encode(), digest_size=size).digest() for index in range(count)]
