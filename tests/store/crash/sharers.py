"""Processes that append to one pool and read from each other, and tell each other what they have published.

Every process has an inbox, a pipe into which all others write small messages (atomic below PIPE_BUF): which batch of
which process was published, and when by the clock that all processes of a machine share.
"""

from __future__ import annotations

import collections
import os
import random
import select
import struct
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from rewarm.store.contract import Outcome, Store
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

NAMESPACE = "sharers"
POLL_S = 0.5
BATCH_BLOCKS = 8
BLOCK_BYTES = 32 << 10
PAUSE_S = 0.1
"""Between two batches a process serves its inbox for so long: it bounds what 60 seconds write."""

_MESSAGE = struct.Struct("<dII")
assert _MESSAGE.size <= select.PIPE_BUF


@dataclass
class Tally:
    """What one process did, sent to the parent at its end."""

    saved: list[int] = field(default_factory=list)
    hits_own: int = 0
    hits_of_others: int = 0
    hits_common: int = 0
    due: int = 0
    late: int = 0
    """Batches of others that were due, and those of them that the polls had not shown yet."""
    failures: list[str] = field(default_factory=list)


def batch_keys(process: int, batch: int) -> list[bytes]:
    """Keys that only this process saves."""
    return make_keys(BATCH_BLOCKS, f"process {process} batch {batch}")


def common_keys(turn: int) -> list[bytes]:
    """Keys that all processes save, at about the same time."""
    return make_keys(BATCH_BLOCKS, f"common {turn}")


class Sharer:
    """One process at work."""

    def __init__(self, store: Store, process: int, inbox: int, outboxes: list[int]) -> None:
        self.store = store
        self.process = process
        self.inbox = inbox
        self.outboxes = outboxes
        self.tally = Tally()
        self.dice = random.Random(process)
        self.waiting: collections.deque[tuple[float, int, int]] = collections.deque()
        self.visible: list[tuple[int, int]] = []

    def run(self, seconds: float) -> None:
        """Append and read until the time is over."""
        end = time.monotonic() + seconds
        batch = 0
        while time.monotonic() < end:
            self.append(batch)
            if batch % 4 == 0:
                self.append_common(batch // 4)
            self.listen(PAUSE_S)
            self.read_due()
            self.read_any()
            batch += 1

    def append(self, batch: int) -> None:
        """Save a batch of one's own and tell the others."""
        keys = batch_keys(self.process, batch)
        if not self.save(keys):
            return
        self.tally.saved.append(batch)
        message = _MESSAGE.pack(time.monotonic(), self.process, batch)
        for outbox in self.outboxes:
            os.write(outbox, message)
        self.tally.hits_own += self.must_hit(keys, "its own")
        self.visible.append((self.process, batch))

    def append_common(self, turn: int) -> None:
        """Save what everybody saves; whoever comes second may find it there already."""
        keys = common_keys(turn)
        if self.save(keys):
            self.tally.hits_common += self.must_hit(keys, "common")

    def listen(self, seconds: float) -> None:
        """Take messages for so long."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self.inbox], [], [], left_s)[0]:
                for message in _MESSAGE.iter_unpack(os.read(self.inbox, 256 * _MESSAGE.size)):
                    self.waiting.append(message)

    def read_due(self) -> None:
        """Everything published two poll intervals ago must be a hit.

        A poller that the machine did not let run in time is told to read now: then there is no excuse.
        """
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] + 2 * POLL_S <= now:
            published, process, batch = self.waiting.popleft()
            about = f"process {process} batch {batch}, published {now - published:.2f} s ago,"
            keys = batch_keys(process, batch)
            self.tally.due += 1
            if not self.store.lookup(keys).mask.all():
                self.tally.late += 1
                self.store.refresh()
            self.tally.hits_of_others += self.must_hit(keys, about)
            self.visible.append((process, batch))

    def read_any(self) -> None:
        """What was a hit once stays one below capacity."""
        process, batch = self.dice.choice(self.visible)
        self.must_hit(batch_keys(process, batch), f"process {process} batch {batch}, seen before,")

    def save(self, keys: list[bytes]) -> bool:
        """Save blocks; below capacity all are kept."""
        transfer = self.store.save(keys, [payload(key, BLOCK_BYTES) for key in keys])
        good = transfer.wait(60)
        if not all(good):
            self.tally.failures.append(f"a save below capacity was not kept: {set(transfer.outcomes)}")
        return all(good)

    def must_hit(self, keys: list[bytes], about: str) -> int:
        """Load blocks and compare every byte; returns the hits."""
        if not self.store.lookup(keys).mask.all():
            self.tally.failures.append(f"{about} is not found")
        buffers = [bytearray(BLOCK_BYTES) for _ in keys]
        transfer = self.store.load(keys, buffers)
        transfer.wait(60)
        transfer.wait_released(60)
        for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
            if outcome is not Outcome.HIT:
                self.tally.failures.append(f"{about} is {outcome}")
            elif buffer != payload(key, BLOCK_BYTES):
                self.tally.failures.append(f"{about} has wrong bytes")
        return transfer.outcomes.count(Outcome.HIT)


def share(
    url: str, process: int, seconds: float, inbox: Connection, outboxes: list[Connection], tell: Connection
) -> None:
    """Body of one process."""
    with open_store(f"{url}&poll={POLL_S}s", namespace=NAMESPACE) as store:
        sharer = Sharer(store, process, inbox.fileno(), [outbox.fileno() for outbox in outboxes])
        tell.send("ready")
        tell.poll(60)
        sharer.run(seconds)
        tell.send(sharer.tally)
