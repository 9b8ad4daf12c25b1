"""The restore path: one thread that keeps a device full of reads, verifies what comes back and gives verdicts.

Requests are served in the order they came, each with as many reads in flight as the device takes. A window of blocks is
planned at a time, so that merging, splitting and addresses are numpy operations over many blocks. Checksums are
computed while later reads are in flight. A block that fails falls back to its second copy; then it is a miss.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rewarm.store.buffers import BouncePool, address_of
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import OPERATION, READ, Completions, Device
from rewarm.store.hashing import Hasher
from rewarm.store.index import Places
from rewarm.store.layout import PAGE
from rewarm.store.loop import IoLoop
from rewarm.store.operations import longest_read, plan_operations
from rewarm.store.requests import Failure, LoadJob, Window, failure_of
from rewarm.store.segments import FileCache
from rewarm.store.transfer import Counters

ATTEMPTS_MAX = 4
"""Failures of one block before it is a miss: at once, after a refresh, and in its second copy likewise."""

_TAG_SHIFT = 32


class ReadSide(Protocol):
    """What the loop needs of its store."""

    files: FileCache
    counters: Counters
    alignment: int
    always_bounce: bool
    io_deadline_s: float

    def path_of(self, slot: int) -> Path:
        """Path of a segment."""

    def next_place(self, key: bytes, slot: int, offset: int, failure: Failure, attempt: int) -> Places | None:
        """Where to read a block after its `attempt`-th failure, at this place; None where there is no copy left."""


class ReadLoop(IoLoop[LoadJob]):
    """Owns a device and a thread that starts with the first request."""

    thread_name = "rewarm-read"

    def __init__(self, side: ReadSide, device: Device) -> None:
        super().__init__(device, side.io_deadline_s)
        self._side = side
        self._hasher = Hasher()
        self._bounce = BouncePool()
        self._jobs: deque[LoadJob] = deque()
        self._windows: dict[int, Window] = {}
        self._current: Window | None = None
        self._next_window = 0

    # One turn of the loop, called by the base class.

    def accept(self, job: LoadJob) -> None:
        """Take a new job."""
        self._jobs.append(job)

    def send(self) -> None:
        """Fill the device."""
        device = self._device
        while device.in_flight() < device.depth:
            window = self._current or self._plan()
            if window is None:
                return
            self._current = window
            if window.job.transfer.done():
                self._current = None
                self._close_if_over(window)
                continue
            count = self._submit_some(window.operations[window.sent :])
            if not count:
                return
            window.sent += count
            window.in_flight += count
            window.submitted_s = time.monotonic()
            if window.sent == len(window.operations):
                self._current = None

    def complete(self, completions: Completions) -> None:
        """Take completions: verify finished blocks, retry failed ones."""
        numbers = completions["tag"] >> _TAG_SHIFT
        for number in np.unique(numbers).tolist():
            mine = completions[numbers == number]
            window = self._windows[number]
            which = (mine["tag"] & 0xFFFFFFFF).astype(np.int64)
            window.in_flight -= len(mine)
            self._left(window.operations[which])
            finished = self._note_results(window, which, mine["result"])
            self._judge(window, finished)
            self._close_if_over(window)

    def tidy(self, now_s: float) -> None:
        """Deadlines, and jobs that ended without us."""
        for window in list(self._windows.values()):
            late = window.in_flight and now_s - window.submitted_s > self.io_deadline_s
            if late and not window.expired:
                window.expired = True
                window.job.transfer.settle(window.blocks, Outcome.TIMED_OUT)
            job = window.job
            if job.transfer.done():
                self._close_if_over(window)
                self._release_early(job)
        for job in [job for job in self._jobs if job.exhausted()]:
            self._jobs.remove(job)
            job.queued = False
            self._release_if_over(job)

    def give_up(self, outcome: Outcome) -> None:
        """Every block without a verdict gets this one."""
        for job in self._all_jobs():
            job.transfer.settle(job.transfer.pending(), outcome)

    def release_all(self) -> None:
        """After a failure, with nothing left in the kernel: give back all memory, close all files."""
        for window in self._windows.values():
            for path in window.paths:
                self._side.files.release(path)
        for job in self._all_jobs():
            self._release(job)

    def _all_jobs(self) -> set[LoadJob]:
        return {*self._jobs, *(window.job for window in self._windows.values())}

    def idle(self) -> bool:
        """True when no job is left."""
        return not self._jobs and not self._windows

    # Planning.

    def _plan(self) -> Window | None:
        while self._jobs:
            job = self._jobs[0]
            if job.exhausted():
                self._jobs.popleft()
                job.queued = False
                self._release_if_over(job)
                continue
            room = self._side.files.room()
            if not room and self._windows:
                return None
            blocks, merge = job.take(max(room, 1))
            window = self._window(job, blocks, merge)
            if window is None or len(window.operations):
                return window
            self._close_if_over(window)
        return None

    def _window(self, job: LoadJob, blocks: npt.NDArray[np.int64], merge: bool) -> Window | None:
        """Plan blocks; None when bounce memory must be waited for."""
        lengths = job.borrowed.lengths[blocks]
        addresses = job.borrowed.addresses[blocks].copy()
        unit = self._side.alignment
        bounced = (addresses % unit != 0) | (lengths % unit != 0) | self._side.always_bounce
        regions: dict[int, npt.NDArray[np.uint8]] = {}
        for i in np.flatnonzero(bounced).tolist():
            region = self._bounce.take(int(lengths[i]))
            if region is None:
                job.give_back(blocks[i:], merge)
                if not i:
                    return None
                blocks, lengths, addresses = blocks[:i], lengths[:i], addresses[:i]
                break
            regions[i] = region
            addresses[i] = address_of(region)
        lengths = np.where(bounced[: len(blocks)], -(-lengths // PAGE) * PAGE, lengths)
        self._next_window = (self._next_window + 1) & 0x7FFFFFFF
        window = Window(self._next_window, job, blocks, regions)
        job.windows += 1
        self._windows[window.number] = window
        self._prepare(window, addresses, lengths, merge)
        return window

    def _prepare(
        self,
        window: Window,
        addresses: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        merge: bool,
    ) -> None:
        job, blocks = window.job, np.array(window.blocks, np.int64)
        slots = job.slot[blocks]
        descriptors, lost = self._open(window, slots)
        for i in np.flatnonzero(np.isin(slots, list(lost))).tolist():
            self._failed(job, window.blocks[i], lost[int(slots[i])])
        keep = np.flatnonzero(~np.isin(slots, list(lost)))
        offsets, longest = job.offset[blocks[keep]], longest_read(int(lengths[keep].sum()))
        plan = plan_operations(slots[keep], offsets, addresses[keep], lengths[keep], merge=merge, longest=longest)
        operations = np.zeros(len(plan.length), OPERATION)
        operations["tag"] = (window.number << _TAG_SHIFT) + np.arange(len(operations))
        operations["opcode"] = READ
        operations["fd"] = [descriptors[slot] for slot in plan.segment.tolist()]
        operations["offset"], operations["address"], operations["length"] = plan.offset, plan.address, plan.length
        if len(keep) < len(blocks):
            window.regions = self._keep_regions(window.regions, keep.tolist())
            window.blocks = blocks[keep].tolist()
        window.plan, window.operations, window.remaining = plan, operations, plan.per_block.tolist()
        window.undivided = bool((plan.per_block == 1).all())

    def _keep_regions(
        self, regions: dict[int, npt.NDArray[np.uint8]], keep: list[int]
    ) -> dict[int, npt.NDArray[np.uint8]]:
        for i in set(regions) - set(keep):
            self._bounce.give(regions[i])
        return {new: regions[old] for new, old in enumerate(keep) if old in regions}

    def _open(self, window: Window, slots: npt.NDArray[np.int64]) -> tuple[dict[int, int], dict[int, Failure]]:
        """Descriptors of segments by slot, and the outcome for those that cannot be opened."""
        descriptors: dict[int, int] = {}
        lost: dict[int, Failure] = {}
        for slot in np.unique(slots).tolist():
            path = self._side.path_of(slot)
            try:
                descriptors[slot] = self._side.files.acquire(path)
                window.paths.append(path)
            except OSError as error:
                lost[slot] = failure_of(-(error.errno or errno.EIO))
        return descriptors, lost

    # Completion.

    def _note_results(self, window: Window, which: npt.NDArray[np.int64], results: npt.NDArray[np.int64]) -> list[int]:
        """Book results of requests; returns the blocks all of whose requests are back."""
        plan = window.plan
        self._side.counters.add(bytes_read=int(results[results > 0].sum()))
        for at in np.flatnonzero(results != plan.length[which]).tolist():
            # A merged read fails as a whole: its blocks are read alone before one of them is blamed.
            operation = int(which[at])
            alone = plan.first[operation] == plan.last[operation]
            for block in range(plan.first[operation], plan.last[operation] + 1):
                window.failed[block] = failure_of(int(results[at])) if alone else None
        ranges = zip(plan.first[which].tolist(), plan.last[which].tolist(), strict=True)
        if window.undivided:
            return [block for first, last in ranges for block in range(first, last + 1)]
        finished = []
        remaining = window.remaining
        for first, last in ranges:
            for block in range(first, last + 1):
                remaining[block] -= 1
                if not remaining[block]:
                    finished.append(block)
        return finished

    def _judge(self, window: Window, finished: list[int]) -> None:
        job = window.job
        if job.released:
            return
        hits, padding = self._verify_in_place(window, finished), 0
        for i in finished if len(hits) < len(finished) else ():
            block, region = window.blocks[i], window.regions.pop(i, None)
            good = i not in window.failed and self._verify(job, block, region)
            if region is not None:
                padding += 0 if i in window.failed else len(region) - len(job.borrowed.views[block])
                self._bounce.give(region)
            if good:
                hits.append(block)
            elif (failure := window.failed.get(i, Failure.MISMATCH)) is None:
                self._again(job, block)
            else:
                self._failed(job, block, failure)
        if padding:
            self._side.counters.add(bytes_read=-padding, bytes_padding=padding)
        if hits:
            ending = job.windows == 1 and window.over() and job.planned()
            if ending:
                self._let_go(job)
            job.transfer.settle(hits, Outcome.HIT, releasing=ending)

    def _verify_in_place(self, window: Window, finished: list[int]) -> list[int]:
        """The common case, in few steps a block: all read in place and right. Else none, for one by one."""
        if window.regions or window.failed:
            return []
        numbers, views, checksums = window.blocks, window.job.borrowed.views, window.job.checksum
        blocks, digest = [numbers[i] for i in finished], self._hasher.digest
        return blocks if [digest(views[block]) for block in blocks] == [checksums[block] for block in blocks] else []

    def _verify(self, job: LoadJob, block: int, region: npt.NDArray[np.uint8] | None) -> bool:
        """Compare the checksum of what was read; a bounced block is copied to its place only if it is right."""
        view = job.borrowed.views[block]
        payload = view if region is None else region[: len(view)]
        if self._hasher.digest(payload) != job.checksum[block]:
            return False
        if region is not None:
            view[:] = payload
        return True

    def _failed(self, job: LoadJob, block: int, failure: Failure) -> None:
        """Read a block elsewhere, or give its verdict."""
        job.attempts[block] += 1
        place = None
        if job.attempts[block] < ATTEMPTS_MAX:
            slot, offset = int(job.slot[block]), int(job.offset[block])
            place = self._side.next_place(job.keys[block], slot, offset, failure, job.attempts[block])
        if place is None or int(place.length[0]) != int(job.borrowed.lengths[block]):
            job.transfer.settle([block], failure.outcome)
            return
        job.slot[block], job.offset[block] = int(place.segment[0]), int(place.offset[0])
        job.checksum[block] = place.checksum[0]
        self._again(job, block)

    def _again(self, job: LoadJob, block: int) -> None:
        job.again.append(block)
        if not job.queued:
            job.queued = True
            self._jobs.appendleft(job)

    # The end of windows and jobs.

    def _close_if_over(self, window: Window) -> None:
        if not window.over() or self._windows.pop(window.number, None) is None:
            return
        if self._current is window:
            self._current = None
        for path in window.paths:
            self._side.files.release(path)
        for region in window.regions.values():
            self._bounce.give(region)
        window.job.windows -= 1
        self._release_if_over(window.job)

    def _release_if_over(self, job: LoadJob) -> None:
        if not job.windows and not job.queued and job.exhausted():
            self._release(job)

    def _release_early(self, job: LoadJob) -> None:
        """What is only in flight into our own memory need not keep the caller's."""
        mine = [window for window in self._windows.values() if window.job is job]
        if not any(window.in_place for window in mine if window.in_flight):
            self._release(job)

    def _release(self, job: LoadJob) -> None:
        if not job.released:
            self._let_go(job)
            job.transfer.release()

    def _let_go(self, job: LoadJob) -> None:
        job.released = True
        self._side.counters.add(borrowed_bytes=-int(job.borrowed.lengths.sum()))
