"""From blocks to operations: merges what is contiguous on both sides, splits what is large. Pure and vectorised.

One operation per block in file order; blocks that follow each other in the file *and* in memory become one operation,
and nothing is longer than a limit, so that one large block also keeps several requests in flight.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

OPERATION_BYTES = 1 << 20
"""Longest read of a short request: large enough for the medium's speed, small enough that one block fills a queue."""

QUEUE_REQUESTS = 64
"""Requests that fill the queues of any medium we know."""

LONGER_MAX = 4
"""So many times longer are the reads of a long request: cheaper by the byte, and still enough to fill the queues."""

Integers = npt.NDArray[np.int64]


class OperationPlan(msgspec.Struct, frozen=True, eq=False):
    """Operations over blocks in file order, shape (operations,) each; blocks are positions in the arrays given."""

    segment: Integers
    offset: Integers
    address: Integers
    length: Integers
    first: Integers
    last: Integers
    per_block: Integers
    """Operations that touch each block, shape (blocks,)."""


def plan_operations(
    segments: Integers,
    offsets: Integers,
    addresses: Integers,
    lengths: Integers,
    *,
    merge: bool = True,
    longest: int = OPERATION_BYTES,
) -> OperationPlan:
    """Plan requests for blocks sorted by (segment, offset), shape (blocks,) each; lengths are whole device units.

    Without `merge` every block has requests of its own, so that a failed one names its block.
    """
    if not len(segments):
        nothing = np.zeros(0, np.int64)
        return OperationPlan(nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    joined = (
        np.bool_(merge)
        & (segments[1:] == segments[:-1])
        & (offsets[1:] == offsets[:-1] + lengths[:-1])
        & (addresses[1:] == addresses[:-1] + lengths[:-1])
    )
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    line = np.concatenate(([0], np.cumsum(lengths)))
    run_start = line[heads]
    run_length = np.append(run_start[1:], line[-1]) - run_start
    pieces = -(-run_length // longest)
    run = np.repeat(np.arange(len(heads)), pieces)
    step = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * longest
    length = np.minimum(run_length[run] - step, longest)
    start = run_start[run] + step
    first = np.searchsorted(line, start, "right") - 1
    last = np.searchsorted(line, start + length, "left") - 1
    edges = np.bincount(first, minlength=len(lengths)) - np.bincount(last + 1, minlength=len(lengths) + 1)[:-1]
    return OperationPlan(
        segments[heads][run],
        offsets[heads][run] + step,
        addresses[heads][run] + step,
        length,
        first,
        last,
        np.cumsum(edges),
    )


def longest_read(total: int) -> int:
    """Bytes of the longest single read when `total` bytes are wanted together; whole MiB."""
    return OPERATION_BYTES * min(max(total // (QUEUE_REQUESTS * OPERATION_BYTES), 1), LONGER_MAX)
