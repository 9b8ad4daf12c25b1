"""Fills a store with the sessions of a job, one session after another, as they would have been stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rewarm.bench.destination import cut, pad
from rewarm.bench.payload import Payload
from rewarm.bench.raw import Arena, make_arena
from rewarm.errors import StorageError
from rewarm.store.contract import GOOD_OUTCOMES, SAVE_QUEUE_BYTES, Store, Transfer
from rewarm.workload.sessions import Sessions

_BATCH_BYTES = 128 << 20
"""Saved together: large enough for the store to write at full speed, and two of them stay below its queue's budget."""
SAVE_S = 300.0
"""A batch that is not saved in this time means a medium that has failed."""


@dataclass(frozen=True)
class _Batch:
    """Blocks handed to the store and not known to be stored yet."""

    transfer: Transfer
    payload_bytes: int


def populate(store: Store, sessions: Sessions, payload: Payload, advance: Callable[[float], None]) -> None:
    """Store every block of every session; calls `advance` with bytes saved. Raises `StorageError` when one is refused.

    One batch is made while the one before is written, unless blocks are too large for that.
    """
    padded = pad(sessions.lengths)
    side_bytes = min(max(_BATCH_BYTES, max(padded)), sum(padded))
    sides = 2 if 2 * side_bytes <= SAVE_QUEUE_BYTES else 1  # over its budget a store refuses saves
    arena = make_arena(sides * side_bytes)
    runs = cut(padded, side_bytes)
    work = [(session, blocks) for session in range(sessions.count) for blocks in runs]
    running: list[_Batch | None] = [None] * sides
    try:
        for turn, (session, blocks) in enumerate(work):
            side = turn % sides
            advance(_finish(running[side]))
            running[side] = None
            memory = arena[side * side_bytes : (side + 1) * side_bytes]
            running[side] = _save(store, sessions, payload, session, blocks, memory, padded)
        for batch in running:
            advance(_finish(batch))
        store.flush()
    finally:
        for batch in filter(None, running):
            batch.transfer.cancel()
            batch.transfer.wait_released(SAVE_S)


def _save(
    store: Store,
    sessions: Sessions,
    payload: Payload,
    session: int,
    blocks: range,
    memory: Arena,
    padded: list[int],
) -> _Batch:
    """Make some blocks of one session in `memory` and hand them to the store."""
    keys, numbers = sessions.keys(session), sessions.numbers(session)
    buffers: list[Arena] = []
    at = 0
    for block in blocks:
        buffers.append(memory[at : at + sessions.lengths[block]])
        payload.fill(numbers[block], buffers[-1])
        at += padded[block]
    return _Batch(store.save(keys[blocks.start : blocks.stop], buffers), sum(len(buffer) for buffer in buffers))


def _finish(batch: _Batch | None) -> int:
    """Wait until a batch is stored and its memory is free; returns its bytes."""
    if batch is None:
        return 0
    batch.transfer.wait(SAVE_S)
    bad = [outcome for outcome in batch.transfer.outcomes if outcome not in GOOD_OUTCOMES]
    if bad or not batch.transfer.wait_released(SAVE_S):
        causes = ", ".join(sorted({str(outcome) for outcome in bad})) or "the memory was not given back"
        raise StorageError(f"the store did not take {len(bad)} blocks while it was filled: {causes}")
    return batch.payload_bytes
