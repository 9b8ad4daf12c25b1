"""The save path: one thread that fills segments, keeps writes in flight, and publishes what has arrived.

A block is published, and True for its caller, once its payload is on the medium's side and the frame that names it is
written. Syncs come with every sealed segment and every few MiB, not with every block: a crash may lose the last saves,
never serve them wrong. Where the medium acknowledges from a cache, the payload is synced before the frame.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from rewarm.store.appending import FULL, Appender
from rewarm.store.buffers import BouncePool
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import OPERATION, SYNC, Completions, Device
from rewarm.store.hashing import Hasher
from rewarm.store.layout import PAGE
from rewarm.store.loop import IoLoop, fulfil
from rewarm.store.saving import GROUP_BLOCKS, GROUP_BYTES, TAG_SHIFT, Command, Group, SaveJob, WriteSide

SYNC_BYTES = 64 << 20
"""Payload after which a sync is started: bounds what a power loss costs, at a few percent of the bandwidth."""


class WriteLoop(IoLoop[SaveJob | Command]):
    """Owns a device and a thread that starts with the first save."""

    thread_name = "rewarm-write"

    def __init__(self, side: WriteSide, device: Device) -> None:
        super().__init__(device, side.io_deadline_s)
        self._side = side
        self._bounce = BouncePool()
        self._hasher = Hasher()
        self._jobs: deque[SaveJob | Command] = deque()
        self._groups: dict[int, Group] = {}
        self._unsent: deque[Group] = deque()
        self._writing: dict[bytes, list[tuple[SaveJob, int]]] = {}
        self._after: dict[int, Callable[[int], None]] = {}
        self._syncs: deque[tuple[int, Callable[[int], None]]] = deque()
        self._next_number = 1
        self.turned_s = 0.0
        """When this loop was last seen at work."""
        self.appender = Appender(side, lambda descriptor, then: self._syncs.append((descriptor, then)))

    # One turn of the loop, called by the base class.

    def accept(self, job: SaveJob | Command) -> None:
        """Take a new job; a command that need not wait runs at once."""
        if isinstance(job, Command) and not job.drained:
            self._run_command(job)
        else:
            self._jobs.append(job)

    def send(self) -> None:
        """Start syncs that are due, then writes."""
        device = self._device
        while self._syncs and device.in_flight() < device.depth:
            descriptor, then = self._syncs.popleft()
            number = self._number()
            self._after[number] = then
            operation = np.zeros(1, OPERATION)
            operation["tag"], operation["opcode"], operation["fd"] = number << TAG_SHIFT, SYNC, descriptor
            device.submit(operation)
        while device.in_flight() < device.depth:
            group = self._unsent[0] if self._unsent else self._next_group()
            if group is None or not self._send_some(group):
                return

    def complete(self, completions: Completions) -> None:
        """Take completions of writes and syncs."""
        numbers = completions["tag"] >> TAG_SHIFT
        for number in np.unique(numbers).tolist():
            mine = completions[numbers == number]
            then = self._after.pop(number, None)
            if then is not None:
                then(int(mine["result"][0]))
                continue
            group = self._groups[number]
            which = (mine["tag"] & 0xFFFFFFFF).astype(np.int64)
            lengths = group.operations["length"][which].astype(np.int64)
            group.in_flight -= len(mine)
            self._left(group.operations[which])
            for bad in mine["result"][mine["result"] != lengths].tolist():
                group.failed = -bad if bad < 0 else errno.ENOSPC
            self._side.counters.add(bytes_written=int(mine["result"][mine["result"] > 0].sum()))
            self._advance(group)

    def tidy(self, now_s: float) -> None:
        """Deadlines, jobs that were given up, a command that waited."""
        self.turned_s = now_s
        for group in list(self._groups.values()):
            if group.in_flight and not group.expired and now_s - group.submitted_s > self.io_deadline_s:
                group.expired = True
                group.job.transfer.settle(group.blocks, Outcome.TIMED_OUT)
                for block in group.blocks:
                    for other, i in self._writing[group.job.keys[block]]:
                        other.transfer.settle([i], Outcome.TIMED_OUT)
        while self._jobs and not self._groups:
            job = self._jobs[0]
            if isinstance(job, Command):
                if self._busy():
                    break
                self._jobs.popleft()
                self._run_command(job)
            elif job.over():
                self._jobs.popleft()
                self._release_if_over(job)
            else:
                break

    def give_up(self, outcome: Outcome) -> None:
        """Every block without a verdict gets this one; waiting commands fail."""
        for save in self._all_saves():
            save.transfer.settle(save.transfer.pending(), outcome)
            self._release_if_over(save)
        waiting, self._jobs = self._jobs, deque()
        for job in waiting:
            if isinstance(job, Command):
                job.future.set_exception(OSError(errno.EIO, self.broken or "the medium does not answer"))

    def release_all(self) -> None:
        """After a failure, with nothing left in the kernel: give back all memory, close all files."""
        for save in self._all_saves():
            self._release(save)
        self.appender.close_files()

    def _all_saves(self) -> set[SaveJob]:
        followers = (job for waiting in self._writing.values() for job, _ in waiting)
        queued = (job for job in self._jobs if isinstance(job, SaveJob))
        return {*queued, *followers, *(group.job for group in self._groups.values())}

    def idle(self) -> bool:
        """True when no job, write or sync is left."""
        return not self._jobs and not self._busy()

    def finish(self) -> None:
        """Seal what is open, sync, close the writer."""
        self.appender.finish()

    # Building and sending groups.

    def _busy(self) -> bool:
        """True while a write or a sync is under way or due."""
        return bool(self._groups or self._after or self._syncs)

    def _unwritten_bytes(self) -> int:
        """What groups under way will still take: payload, and a page of the log each at least."""
        counted = self._side.counts_written
        return sum(
            PAGE + (0 if counted and group.written() else group.bytes_on_disk()) for group in self._groups.values()
        )

    def _number(self) -> int:
        self._next_number = self._next_number % 0x7FFFFFFF + 1
        return self._next_number

    def _next_group(self) -> Group | None:
        while self._jobs:
            job = self._jobs[0]
            if isinstance(job, Command):
                return None
            self._skip_held(job)
            if job.cursor >= job.count or job.transfer.done():
                self._jobs.popleft()
                self._release_if_over(job)
                continue
            try:
                target = self.appender.target_for(int(job.borrowed.lengths[job.cursor]), self._unwritten_bytes())
            except OSError as error:
                self._refuse(job, Outcome.REFUSED_FULL if error.errno in FULL else Outcome.LOST_MEDIUM)
                continue
            if target is None:
                if self._busy():
                    return None  # What is under way can be evicted once it is sealed.
                self._refuse(job, Outcome.REFUSED_FULL)
                continue
            group = self._fill(Group(self._number(), job, target))
            if group is None:
                return None
            if group.blocks:
                self._start(group)
                return group
        return None

    def _skip_held(self, job: SaveJob) -> None:
        """Answer blocks at the front that are published already: they must not cost a new segment."""
        start = job.cursor
        while job.cursor < job.count and self._side.holds(job.keys[job.cursor]):
            job.cursor += 1
        if job.cursor > start:
            job.transfer.settle(range(start, job.cursor), Outcome.ALREADY)

    def _fill(self, group: Group) -> Group | None:
        """Take blocks of the job into the group; None when it must wait for bounce memory."""
        job, target, total = group.job, group.target, 0
        borrowed, already = job.borrowed, []
        while job.cursor < job.count and len(group.blocks) < GROUP_BLOCKS and total < GROUP_BYTES:
            i, key = job.cursor, job.keys[job.cursor]
            length = int(borrowed.lengths[i])
            if key in self._writing:
                job.waiting += 1
                self._writing[key].append((job, i))
            elif self._side.holds(key):
                already.append(i)
            elif not target.room_for(length):
                break
            else:
                if int(borrowed.addresses[i]) % self._side.alignment or length % 4096:
                    region = self._bounce.take(length)
                    if region is None:
                        break
                    group.regions[len(group.blocks)] = region
                self._writing[key] = []
                group.blocks.append(i)
                group.offsets.append(target.allocate(length))
                total += length
            job.cursor += 1
        if already:
            job.transfer.settle(already, Outcome.ALREADY)
        waiting_for_bounce = not group.blocks and job.cursor < job.count and target.room_for(length)
        return None if waiting_for_bounce and self._groups else group

    def _start(self, group: Group) -> None:
        group.prepare()
        group.job.groups += 1
        group.target.groups += 1
        self._groups[group.number] = group
        self._unsent.append(group)

    def _send_some(self, group: Group) -> bool:
        """Submit what fits of a group's writes; False when the device is full."""
        count = self._submit_some(group.operations[group.sent :])
        if not count:
            return False
        group.sent += count
        group.in_flight += count
        group.submitted_s = time.monotonic()
        if group.sent == len(group.operations):
            self._unsent.popleft()
        if not group.checksums:
            group.sum_up(self._hasher)
        return True

    # What follows a completed group.

    def _advance(self, group: Group) -> None:
        if not group.written():
            return
        if group.failed:
            self._recover(group)
        elif self._side.sync_first and not group.synced:
            self._syncs.append((group.target.descriptor, lambda result: self._payload_synced(group, result)))
        else:
            self._publish(group)

    def _payload_synced(self, group: Group, result: int) -> None:
        group.synced = True
        group.failed = -result if result < 0 else 0
        self._advance(group)

    def _recover(self, group: Group) -> None:
        """After a failed write: once more behind an eviction when the medium is full, else refuse."""
        full = group.failed in FULL
        try:
            retry = full and not group.retried and self._side.make_room(group.bytes_on_disk(), full=True)
        except OSError:
            retry = False
        if retry:
            group.retried, group.failed, group.sent = True, 0, 0
            self._unsent.append(group)
            return
        if not full and group.target is self.appender.target:
            self.appender.seal(group.target)
        self._end(group, Outcome.REFUSED_FULL if full else Outcome.LOST_MEDIUM)

    def _publish(self, group: Group) -> None:
        writer = group.target.writer
        if writer.late():
            self._give_up_writer(group)
            return
        try:
            written = sum(writer.publish(len(group.job.keys[group.blocks[p[0]]]), e) for p, e in group.entries())
        except OSError as error:
            self._end(group, Outcome.REFUSED_FULL if error.errno in FULL else Outcome.LOST_MEDIUM)
            return
        if writer.late():  # stopped in between: it may have been taken for dead before the frame arrived
            self._give_up_writer(group)
            return
        payload = int(group.job.borrowed.lengths[group.blocks].sum())
        padding = group.bytes_on_disk() - payload
        self._side.counters.add(bytes_log=written, bytes_padding=padding, bytes_written=-padding)
        self._side.published(group)
        group.target.unsynced_bytes += payload
        self._end(group, Outcome.STORED)
        if group.target.unsynced_bytes >= SYNC_BYTES and not group.target.full:
            group.target.unsynced_bytes = 0
            self._syncs.append((group.target.descriptor, lambda _: None))
            self._syncs.append((writer.log.descriptor, lambda _: None))

    def _give_up_writer(self, group: Group) -> None:
        """This process did not run, or the medium not answer, for half a lease: nothing it writes there counts."""
        self.appender.leave(group.target.writer)
        self._end(group, Outcome.TIMED_OUT)

    def _end(self, group: Group, outcome: Outcome) -> None:
        """Give verdicts, to followers too, and let go of the group's memory and segment."""
        job = group.job
        del self._groups[group.number]
        for region in group.regions.values():
            self._bounce.give(region)
        job.transfer.settle(group.blocks, outcome)
        follow = Outcome.ALREADY if outcome is Outcome.STORED else outcome
        for block in group.blocks:
            for other, i in self._writing.pop(job.keys[block]):
                other.waiting -= 1
                other.transfer.settle([i], follow)
                self._release_if_over(other)
        job.groups -= 1
        self._release_if_over(job)
        self.appender.group_over(group.target)

    def _refuse(self, job: SaveJob, outcome: Outcome) -> None:
        """Refuse the rest of a job, except what is there already."""
        rest = range(job.cursor, job.count)
        held = [i for i in rest if self._side.holds(job.keys[i])]
        job.transfer.settle(held, Outcome.ALREADY)
        job.cursor = job.count
        job.transfer.settle([i for i in rest if i not in set(held)], outcome)

    def _release_if_over(self, job: SaveJob) -> None:
        if job.over():
            self._release(job)

    def _release(self, job: SaveJob) -> None:
        if not job.transfer.released():
            self._side.counters.add(queued_bytes=-job.queued_bytes, borrowed_bytes=-job.queued_bytes)
            job.transfer.release()

    def _run_command(self, command: Command) -> None:
        fulfil(command.future, command.action)
