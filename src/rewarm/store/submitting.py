"""What a store on a medium does with a batch before its I/O takes over: sorts keys, keeps to the budget, queues.

Returns at once, always with a transfer: what cannot be served has its verdict already, and its memory back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rewarm.store.buffers import Borrowed, borrow, hold
from rewarm.store.contract import Buffers, Outcome, check_keys
from rewarm.store.index import NO_ROW, Index
from rewarm.store.patience import Watch
from rewarm.store.reading import ReadLoop
from rewarm.store.requests import LoadJob
from rewarm.store.transfer import BatchTransfer, Counters, settled_transfer

QueueSave = Callable[[BatchTransfer, Sequence[bytes], Callable[[], Borrowed], int], bool]
"""Takes a transfer, the keys and buffers of its first blocks, and their bytes; False where nothing saves any more."""


def submit_load(
    keys: Sequence[bytes],
    buffers: Buffers,
    index: Index,
    lock: threading.RLock,
    counters: Counters,
    reads: ReadLoop,
    watch: Watch,
) -> BatchTransfer:
    """Have what the index holds read into the caller's memory; the rest is `missing` or `wrong_size`.

    Raises `MisuseError` for bad keys and buffers.
    """
    check_keys(keys)
    borrowed = borrow(buffers, len(keys), writable=True)
    transfer = BatchTransfer(len(keys), counters, loading=True, wake=reads.wake)
    counters.add(borrowed_bytes=int(borrowed.lengths.sum()))
    read_blocks(transfer, list(keys), borrowed, np.arange(len(keys)), index, lock, counters, reads, watch)
    return transfer


def read_blocks(
    transfer: BatchTransfer,
    keys: list[bytes],
    borrowed: Borrowed,
    blocks: npt.NDArray[np.int64],
    index: Index,
    lock: threading.RLock,
    counters: Counters,
    reads: ReadLoop,
    watch: Watch,
) -> None:
    """Have some blocks of a load read, which nobody else reads any more; all of its memory goes back with the last."""
    with lock:
        places = index.places(keys)
    held = places.row[blocks] != NO_ROW
    fits = places.length[blocks] == borrowed.lengths[blocks]
    transfer.settle(blocks[~held], Outcome.MISSING)
    transfer.settle(blocks[held & ~fits], Outcome.WRONG_SIZE)
    wanted = blocks[held & fits]
    if len(wanted):
        index.note_reads(places.row[wanted])
        watch.add(transfer)
        if reads.put(LoadJob(transfer, keys, borrowed, places, wanted)):
            return
        transfer.settle(wanted, Outcome.LOST_MEDIUM)
    counters.add(borrowed_bytes=-int(borrowed.lengths.sum()))
    transfer.release()


def submit_save(
    keys: Sequence[bytes],
    buffers: Buffers,
    counters: Counters,
    limit_bytes: int,
    queue: QueueSave,
    wake: Callable[[], None] = lambda: None,
) -> BatchTransfer:
    """Queue the blocks that the budget takes, from the front; the rest is `refused_budget`."""
    held, sizes = hold(buffers, len(keys))
    total = sum(sizes)
    if not total:
        return settled_transfer(0, Outcome.ALREADY, counters, loading=False)
    count = _within_budget(sizes, total, counters, limit_bytes)
    transfer = BatchTransfer(len(keys), counters, loading=False, wake=wake)
    transfer.settle(range(count, len(keys)), Outcome.REFUSED_BUDGET)
    taken = sum(sizes[:count])
    counters.add(borrowed_bytes=taken)
    if not count or not queue(transfer, keys[:count], lambda: borrow(held[:count], count, writable=False), taken):
        counters.add(queued_bytes=-taken, borrowed_bytes=-taken)
        transfer.settle(range(count), Outcome.LOST_MEDIUM)
        transfer.release()
    return transfer


def _within_budget(sizes: list[int], total: int, counters: Counters, limit_bytes: int) -> int:
    """How many blocks from the front the save queue takes now; their bytes are reserved."""
    if counters.reserve(total, limit_bytes):
        return len(sizes)
    for count, size in enumerate(sizes):
        if not counters.reserve(size, limit_bytes):
            return count
    return len(sizes)
