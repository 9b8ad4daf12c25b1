"""Keys and blocks for tests: what a block holds follows from its key, so any process can tell a wrong byte.

Blocks are incompressible and differ from key to key in every 32 bytes, so a block that came back under another key,
shifted, or stitched together from two blocks is never taken for right.
"""

from __future__ import annotations

import hashlib

import numpy as np


def payload(key: bytes, size: int) -> bytes:
    """The `size` bytes that belong to `key`: the same in every process, and a prefix of those of a larger size."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=seed)).bytes(size)


def make_keys(count: int, tag: str = "", *, size: int = 32) -> list[bytes]:
    """`count` distinct keys of `size` bytes (8 to 64); other tags give other keys."""
    return [hashlib.blake2b(f"{tag}/{index}".encode(), digest_size=size).digest() for index in range(count)]
