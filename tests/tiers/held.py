"""A memory store whose loads wait until the test serves them, one batch at a time: order and release can be seen."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rewarm.store.buffers import borrow
from rewarm.store.contract import Buffers, Outcome, Transfer
from rewarm.store.memory import MemoryStore
from rewarm.store.transfer import BatchTransfer, Counters

WAIT_S = 10.0


class HeldStore(MemoryStore):
    """`asked` holds the keys of every load so far, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []
        self._held: list[tuple[BatchTransfer, Sequence[bytes], Buffers]] = []
        self._changed = threading.Condition()

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Hold a load; its memory is the store's until `serve` or `let_go`."""
        borrow(buffers, len(keys), writable=True)
        transfer = BatchTransfer(len(keys), Counters(), loading=True)
        with self._changed:
            self.asked.append(list(keys))
            self._held.append((transfer, keys, buffers))
            self._changed.notify_all()
        return transfer

    def wait_for(self, batches: int) -> None:
        """Wait until so many batches have been asked for in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.asked) >= batches, WAIT_S), f"{len(self.asked)} batches"

    def held(self) -> int:
        """Batches that wait."""
        return len(self._held)

    def serve(self) -> None:
        """Carry out the oldest batch."""
        with self._changed:
            transfer, keys, buffers = self._held.pop(0)
        outcomes = super().load(keys, buffers).outcomes
        for block, outcome in enumerate(outcomes):
            transfer.settle([block], outcome or Outcome.MISSING)
        transfer.release()

    def serve_until(self, *transfers: Transfer) -> None:
        """Carry out batches, oldest first, until these transfers have their verdicts."""
        while not all(transfer.done() for transfer in transfers):
            with self._changed:
                self._changed.wait_for(lambda: bool(self._held), WAIT_S / 1000)
            if self._held:
                self.serve()

    def let_go(self) -> None:
        """Release the oldest batch without touching its memory; verdicts that are not in are `cancelled`."""
        with self._changed:
            transfer, _, _ = self._held.pop(0)
        transfer.release()
