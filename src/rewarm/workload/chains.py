"""Which session a request belongs to, found from its blocks, and the choice of whole sessions for a sample.

A sample of single blocks or requests breaks the leading-run rule of a hit, so samples are of sessions. Where a trace
does not name sessions they are found by this rule: a request belongs to the session that first touched the deepest of
its blocks seen before, unless `BRANCHES_MAX` requests have gone on from that very block: such a block is a common
beginning, a system prompt or a document, and joins nobody. What is shared between sessions is lost from a sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rewarm.workload.requests import UNKNOWN, Requests

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(33)


BRANCHES_MAX = 16
"""A block from which more requests than this went on is shared by sessions, not part of one."""
_DENSE_MARKS = 8
_MARK_GROWTH = 1.25
"""Blocks remembered per prompt: the first eight, then at growing distances, and the last full one."""


class SessionFinder:
    """Names the session of every request of a stream; memory follows requests times the logarithm of their length."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._owner: dict[int, int] = {}
        self._branches: dict[int, int] = {}
        self._next = 0

    def assign(self, requests: Requests) -> NDArray[np.int64]:
        """The session of each request: the trace's own where it has one, else the one found from blocks."""
        if len(requests) == 0 or requests.session[0] != UNKNOWN:
            return requests.session
        full = (requests.input_tokens // self._block_tokens).tolist()
        blocks, offsets = requests.blocks.tolist(), requests.offsets.tolist()
        found = [
            self._session(blocks[start:end][:count])
            for start, end, count in zip(offsets[:-1], offsets[1:], full, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    def _session(self, full_blocks: list[int]) -> int:
        deepest = next((block for block in reversed(full_blocks) if block in self._owner), None)
        session = None
        if deepest is not None:
            branches = self._branches.get(deepest, 0)
            self._branches[deepest] = branches + 1
            session = self._owner[deepest] if branches < BRANCHES_MAX else None
        if session is None:
            session = self._next
            self._next += 1
        for place in _marks(len(full_blocks)):
            self._owner.setdefault(full_blocks[place], session)
        return session


def _marks(length: int) -> list[int]:
    """Places of the blocks to remember in a prompt of `length` full blocks."""
    marks, place = list(range(min(length, _DENSE_MARKS))), float(_DENSE_MARKS)
    while place < length:
        marks.append(int(place))
        place *= _MARK_GROWTH
    return [*marks, length - 1] if length else []


def sampled(sessions: NDArray[np.int64], rate: float, seed: int = 0) -> NDArray[np.bool_]:
    """Which requests a sample of `rate` of the sessions keeps; the same sessions for the same seed."""
    mixed = (sessions.astype(np.uint64) + np.uint64(seed) * _SHIFT + np.uint64(1)) * _MIX
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    return (mixed >> np.uint64(11)).astype(np.float64) < rate * float(1 << 53)


def select(requests: Requests, keep: NDArray[np.bool_]) -> Requests:
    """The requests of a batch where `keep` is true."""
    counts = np.diff(requests.offsets)
    kept_blocks = np.repeat(keep, counts)
    return Requests(
        arrival_s=requests.arrival_s[keep],
        input_tokens=requests.input_tokens[keep],
        output_tokens=requests.output_tokens[keep],
        session=requests.session[keep],
        hit_tokens=requests.hit_tokens[keep],
        offsets=np.concatenate([[0], np.cumsum(counts[keep])]).astype(np.int64),
        blocks=requests.blocks[kept_blocks],
    )
