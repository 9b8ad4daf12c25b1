"""Checksums beside a busy thread: the same bytes out, the lock kept only after it was lost."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from rewarm.store import hashing
from rewarm.store.hashing import KEPT_BYTES, SLICE_BYTES, Hasher
from rewarm.store.layout import digest

BLOCK = np.random.default_rng(5).integers(0, 256, 3 * SLICE_BYTES + 17, np.uint8)


class Clock:
    """A clock that a test moves: `lost` seconds pass during each whole checksum."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.lost_s = 0.0
        self.whole = 0
        monkeypatch.setattr(hashing.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(hashing, "digest", self._digest)

    def _digest(self, data: np.ndarray) -> bytes:
        self.whole += 1
        self.now_s += self.lost_s
        return digest(data)


@pytest.mark.parametrize("size", [1, SLICE_BYTES, SLICE_BYTES + 1, 2 * SLICE_BYTES, len(BLOCK)])
def test_slices_give_the_same_checksum(size: int) -> None:
    assert hashing._in_slices(BLOCK[:size]) == digest(BLOCK[:size]) == Hasher().digest(BLOCK[:size])


def test_the_lock_is_given_up_while_nobody_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hasher = Clock(monkeypatch), Hasher()
    clock.lost_s = 0.001
    assert [hasher.digest(BLOCK) for _ in range(3)] == [digest(BLOCK)] * 3
    assert clock.whole == 3


def test_the_lock_is_kept_after_it_was_lost_and_then_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hasher = Clock(monkeypatch), Hasher()
    clock.lost_s = 0.005
    hasher.digest(BLOCK)
    kept = -(-KEPT_BYTES // len(BLOCK))
    monkeypatch.setattr(hashing, "_in_slices", lambda data: b"sliced")
    assert {hasher.digest(BLOCK) for _ in range(kept)} == {b"sliced"}
    assert clock.whole == 1
    clock.lost_s = 0.0
    assert hasher.digest(BLOCK) == hasher.digest(BLOCK) == digest(BLOCK)


def test_xxhash_keeps_the_lock_for_a_slice() -> None:
    assert getattr(xxhash._xxhash, "_GIL_MINSIZE", 100 << 10) >= SLICE_BYTES
