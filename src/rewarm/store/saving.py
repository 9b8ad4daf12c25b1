"""Save requests inside the write loop: a job is one `save`, a group is some blocks that are published together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rewarm.store.buffers import Borrowed, address_of
from rewarm.store.compaction import Snapshot
from rewarm.store.devices.base import OPERATION, WRITE
from rewarm.store.hashing import Hasher
from rewarm.store.layout import PAGE, entry_dtype, pages
from rewarm.store.operations import plan_operations
from rewarm.store.segments import Segment
from rewarm.store.transfer import BatchTransfer, Counters
from rewarm.store.writer import OpenSegment, Writer

GROUP_BLOCKS = 1024
GROUP_BYTES = 16 << 20
"""Blocks published by one write to the log: spreads its cost, while later groups keep the device busy."""

WRITE_BYTES = 4 << 20
"""Longest single write. Writes that extend a file wait for each other in the kernel: few long ones beat many short."""

TAG_SHIFT = 32


class SaveJob:
    """One `save` under way. Borrowing the buffers is left to the loop: the caller pays for nothing but their sizes."""

    def __init__(self, transfer: BatchTransfer, keys: Sequence[bytes], borrow: Callable[[], Borrowed]) -> None:
        self.transfer = transfer
        self.keys = keys
        self.count = len(keys)
        self.cursor = 0
        self.groups = 0
        self.waiting = 0
        self.queued_bytes = 0
        self._borrow: Callable[[], Borrowed] | None = borrow
        self._borrowed: Borrowed | None = None

    @property
    def borrowed(self) -> Borrowed:
        """The caller's buffers."""
        if self._borrowed is None:
            assert self._borrow is not None
            self._borrowed = self._borrow()
            self._borrow = None
        return self._borrowed

    def over(self) -> bool:
        """True when nothing of it is in the kernel, waits for another job's copy, or is still to come."""
        return not self.groups and not self.waiting and (self.cursor >= self.count or self.transfer.done())


class Command:
    """Something to do in the write loop's thread; `drained` ones wait until every earlier save is published."""

    def __init__(self, action: Callable[[], int], *, drained: bool) -> None:
        self.action = action
        self.drained = drained
        self.future: Future[int] = Future()


class Group:
    """Blocks of one job in one segment: written together, published together."""

    def __init__(self, number: int, job: SaveJob, target: OpenSegment) -> None:
        self.number = number
        self.job = job
        self.target = target
        self.blocks: list[int] = []
        self.offsets: list[int] = []
        self.regions: dict[int, npt.NDArray[np.uint8]] = {}
        self.checksums: list[bytes] = []
        self.operations: npt.NDArray[np.void] = np.zeros(0, OPERATION)
        self.sent = 0
        self.in_flight = 0
        self.submitted_s = 0.0
        self.failed = 0
        self.retried = False
        self.synced = False
        self.expired = False

    def bytes_on_disk(self) -> int:
        """Payload and padding."""
        return sum(pages(int(self.job.borrowed.lengths[block])) for block in self.blocks)

    def written(self) -> bool:
        """True when every write is over, however it went."""
        return not self.in_flight and self.sent == len(self.operations)

    def prepare(self) -> None:
        """Plan the writes; bounced blocks are copied and padded with zeros now."""
        borrowed = self.job.borrowed
        blocks = np.array(self.blocks, np.int64)
        lengths = -(-borrowed.lengths[blocks] // PAGE) * PAGE
        addresses = borrowed.addresses[blocks].copy()
        for i, region in self.regions.items():
            view = borrowed.views[self.blocks[i]]
            region[: len(view)] = view
            region[len(view) :] = 0
            addresses[i] = address_of(region)
        same = np.zeros(len(blocks), np.int64)
        plan = plan_operations(same, np.array(self.offsets, np.int64), addresses, lengths, longest=WRITE_BYTES)
        operations = np.zeros(len(plan.length), OPERATION)
        operations["tag"] = (self.number << TAG_SHIFT) + np.arange(len(operations))
        operations["opcode"] = WRITE
        operations["fd"] = self.target.descriptor
        operations["offset"], operations["address"], operations["length"] = plan.offset, plan.address, plan.length
        self.operations = operations

    def sum_up(self, hasher: Hasher) -> None:
        """Checksums of the payloads, computed while the writes are under way."""
        views = self.job.borrowed.views
        self.checksums = [hasher.digest(views[block]) for block in self.blocks]

    def entries(self) -> list[tuple[list[int], npt.NDArray[np.void]]]:
        """(positions in this group, log entries) by key length."""
        by_length: dict[int, list[int]] = {}
        for i, block in enumerate(self.blocks):
            by_length.setdefault(len(self.job.keys[block]), []).append(i)
        batches = []
        for key_bytes, positions in by_length.items():
            entries = np.zeros(len(positions), entry_dtype(key_bytes))
            keys = b"".join(self.job.keys[self.blocks[i]] for i in positions)
            entries["key"] = np.frombuffer(keys, f"V{key_bytes}")
            entries["segment"] = self.target.segment.number
            entries["offset"] = [self.offsets[i] for i in positions]
            entries["length"] = self.job.borrowed.lengths[[self.blocks[i] for i in positions]]
            entries["checksum"] = np.frombuffer(b"".join(self.checksums[i] for i in positions), "V16")
            batches.append((positions, entries))
        return batches


class WriteSide(Protocol):
    """What the loop needs of its store."""

    counters: Counters
    alignment: int
    sync_first: bool
    counts_written: bool
    """Whether the file system counts as used what is written and not synced: a network mount may not."""
    io_deadline_s: float

    def holds(self, key: bytes) -> bool:
        """True when the key is published."""

    def new_writer(self) -> Writer:
        """Make this handle's writer. Raises `OSError`."""

    def snapshot(self, writer_id: str, damage: list[tuple[Segment, int]]) -> Snapshot:
        """What a new log of this handle's writer begins with. Raises `OSError`."""

    def left(self, writer_id: str) -> None:
        """A writer of this handle was given up: others may have taken its files over."""

    def make_room(self, need: int, *, full: bool = False, marks: bool = True) -> bool:
        """Evict until `need` bytes fit; `full` when the medium itself said so. Raises `OSError`.

        Without `marks` only what the capacity itself demands is evicted.
        """

    def published(self, group: Group) -> None:
        """Put a group's blocks into the index."""
