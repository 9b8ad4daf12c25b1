"""Restores with the checksum left out, which no user can do: what a benchmark shows beside them is its cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rewarm.store.hashing import Hasher


class _AnyChecksum(bytes):
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


@contextmanager
def checksum_left_out() -> Iterator[None]:
    """Stores of this process take every block for the right one."""
    checked, Hasher.digest = Hasher.digest, lambda *_: _AnyChecksum()
    try:
        yield
    finally:
        Hasher.digest = checked
