"""The save path of a raw pool: one thread per handle that copies blocks together, writes them, and publishes them.

Blocks of one save lie together in a slot. They are copied into aligned memory of our own, so that a group is a few long
writes whatever the caller's buffers look like; nothing of the caller's is borrowed once that is done.
"""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError, StorageError
from rewarm.store.buffers import Borrowed, address_of, aligned_region, borrow
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import OPERATION, WRITE, Device
from rewarm.store.hashing import Hasher
from rewarm.store.layout import entry_dtype, pages
from rewarm.store.loop import fulfil
from rewarm.store.raw.media import Media
from rewarm.store.raw.owner import Owner
from rewarm.store.raw.slots import Slot
from rewarm.store.transfer import BatchTransfer, Counters

GROUP_BYTES = 16 << 20
GROUP_BLOCKS = 1024
WRITE_BYTES = 4 << 20
TICK_S = 0.05
HUNG_MAX = 4
"""So many media that came and went may keep a group of blocks each; then saves are refused."""


class SaveSide(Protocol):
    """What the thread needs of its store."""

    namespace: bytes
    counters: Counters
    io_deadline_s: float

    @property
    def owner(self) -> Owner | None:
        """The pool's owner in this process, if it is one."""

    def holds(self, key: bytes) -> bool:
        """True when the key is published."""

    def catch_up(self) -> None:
        """Read what was published just now."""


class Job:
    """One `save` under way."""

    def __init__(
        self, transfer: BatchTransfer, keys: Sequence[bytes], buffers: Callable[[], Borrowed], queued_bytes: int
    ) -> None:
        self.transfer = transfer
        self.keys = keys
        self.buffers = buffers
        self.queued_bytes = queued_bytes


class SaveThread:
    """Runs saves and commands one after another; starts with the first."""

    def __init__(self, side: SaveSide, open_device: Callable[[], Device]) -> None:
        self._side = side
        self._open_device = open_device
        self._device: Device | None = None
        self._spare: npt.NDArray[np.uint8] | None = None
        self._work: queue.SimpleQueue[Job | tuple[Future[int], Callable[[], int]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._hasher = Hasher()
        self._hung: list[tuple[Device, Media, object]] = []
        """Devices that did not answer in time, on what medium, and the memory that the kernel may still read."""
        self._cancelled = threading.Event()
        self.broken: str | None = None
        self.turned_s = 0.0

    def put(self, work: Job | tuple[Future[int], Callable[[], int]]) -> bool:
        """Queue a job or a command; False where the thread has ended."""
        with self._lock:
            if self._ended or self.broken:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rewarm-raw-write", daemon=True)
                self._thread.start()
            self._work.put(work)
        return True

    def stop(self, timeout_s: float) -> bool:
        """End when the queue is empty; False when the thread had to be left behind."""
        with self._lock:
            if not self._ended:
                self._ended = True
                self._work.put(None)
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def cancel(self) -> None:
        """Save nothing more of what is queued."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                self.turned_s = time.monotonic()
                if isinstance(work, Job):
                    self._save(work)
                else:
                    fulfil(*work)
        finally:
            if self._device is not None:
                self._device.close()

    def _save(self, job: Job) -> None:
        try:
            self._save_blocks(job)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            late = error.errno == errno.ETIMEDOUT
            outcome = Outcome.REFUSED_FULL if full else Outcome.TIMED_OUT if late else Outcome.LOST_MEDIUM
            job.transfer.settle(job.transfer.pending(), outcome)
        except (StorageError, MisuseError) as error:
            self.broken = f"rewarm-raw-write: {error}"
            job.transfer.settle(job.transfer.pending(), Outcome.LOST_MEDIUM)
        finally:
            self._side.counters.add(queued_bytes=-job.queued_bytes, borrowed_bytes=-job.queued_bytes)
            job.transfer.release()

    def _save_blocks(self, job: Job) -> None:
        owner, transfer = self._side.owner, job.transfer
        left = list(range(len(job.keys)))
        borrowed = job.buffers() if left else borrow([], 0, writable=False)
        while left and not transfer.done() and not self._cancelled.is_set():
            if owner is None or owner.lost:
                transfer.settle(left, Outcome.REFUSED_ADMISSION)
                return
            with owner.lock:
                left, rest_s = self._save_some(owner, job, borrowed, left)
            self._rest(rest_s)

    def _rest(self, seconds: float) -> None:
        """Wait until a slot may be written again; what is saved meanwhile queues, and the owner goes on counting."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0 and not self._cancelled.wait(min(left_s, TICK_S)):
            self.turned_s = time.monotonic()

    def _save_some(self, owner: Owner, job: Job, borrowed: Borrowed, left: list[int]) -> tuple[list[int], float]:
        """One group of blocks into one slot; what is left, and for how long to wait before it is tried.

        Called with the owner's lock held.
        """
        already = [block for block in left if self._side.holds(job.keys[block])]
        job.transfer.settle(already, Outcome.ALREADY)
        left = [block for block in left if block not in set(already)] if already else left
        if not left:
            return [], 0.0
        before, need = owner.evicted_slots, int(borrowed.lengths[left[0]])
        rest_s = owner.rest_s(self._side.namespace, need)
        evicted = owner.evicted_slots - before
        self._side.counters.add(evicted_segments=evicted, evicted_bytes=evicted * owner.header.slot_bytes)
        if rest_s:
            return left, rest_s
        slot = owner.open_slot(self._side.namespace, need)
        if slot is None:
            job.transfer.settle(left[:1], Outcome.REFUSED_FULL)
            return left[1:], 0.0
        group = self._group(owner.header.slot_bytes - slot.end, job, borrowed, left)
        self._write_group(owner, slot, job, borrowed, group)
        return left[len(group) :], 0.0

    def _group(self, room: int, job: Job, borrowed: Borrowed, left: list[int]) -> list[int]:
        """The next blocks that go together into so much room."""
        free = room
        group: list[int] = []
        seen: set[bytes] = set()
        for block in left:
            size = pages(int(borrowed.lengths[block]))
            full = len(group) == GROUP_BLOCKS or (group and size > GROUP_BYTES)
            if full or size > room or job.keys[block] in seen:
                break
            room -= size
            group.append(block)
            seen.add(job.keys[block])
            if free - room >= GROUP_BYTES:
                break
        return group

    def _write_group(self, owner: Owner, slot: Slot, job: Job, borrowed: Borrowed, group: list[int]) -> None:
        sizes = [pages(int(borrowed.lengths[block])) for block in group]
        region = self._memory(sum(sizes))
        offsets, checksums, at = [], [], 0
        for block, size in zip(group, sizes, strict=True):
            view = borrowed.views[block]
            region[at : at + len(view)] = view
            region[at + len(view) : at + size] = 0
            offsets.append(slot.end + at)
            checksums.append(self._hasher.digest(region[at : at + len(view)]))
            at += size
        start = owner.header.slot_offset(slot.number) + slot.end
        slot.end += at  # After a failed write the place is not used again.
        self._write(owner, region, start)
        payload = int(borrowed.lengths[group].sum())
        self._side.counters.add(bytes_written=payload, bytes_padding=at - payload)
        log_bytes = owner.bytes_log
        for key_bytes in sorted({len(job.keys[block]) for block in group}):
            where = [i for i, block in enumerate(group) if len(job.keys[block]) == key_bytes]
            entries = np.zeros(len(where), entry_dtype(key_bytes))
            entries["key"] = np.frombuffer(b"".join(job.keys[group[i]] for i in where), f"V{key_bytes}")
            entries["offset"] = [offsets[i] for i in where]
            entries["length"] = borrowed.lengths[[group[i] for i in where]]
            entries["checksum"] = np.frombuffer(b"".join(checksums[i] for i in where), "V16")
            owner.publish(slot, key_bytes, entries, at)
        self._side.counters.add(bytes_log=owner.bytes_log - log_bytes)
        self._side.catch_up()
        job.transfer.settle(group, Outcome.STORED)

    def _memory(self, count: int) -> npt.NDArray[np.uint8]:
        """The same for every group: fresh memory costs a page fault for each page."""
        if self._spare is None or len(self._spare) < count:
            self._spare = aligned_region(max(count, GROUP_BYTES))
        return self._spare[:count]

    def _write(self, owner: Owner, region: npt.NDArray[np.uint8], start: int) -> None:
        """Write a group through the device. Raises `OSError`; memory of writes that hang stays mapped."""
        if owner.late():
            raise OSError(errno.ESTALE, "the lease has run out")
        self._let_go_of_hung()
        if len(self._hung) == HUNG_MAX or any(medium is owner.media for _, medium, _ in self._hung):
            raise OSError(errno.ETIMEDOUT, "the medium has still not answered")
        if self._device is None:
            self._device = self._open_device()
        device = self._device
        steps = range(0, len(region), WRITE_BYTES)
        operations = np.zeros(len(steps), OPERATION)
        operations["opcode"], operations["fd"] = WRITE, owner.media.descriptor
        for i, step in enumerate(steps):
            length = min(WRITE_BYTES, len(region) - step)
            operations[i] = (i, WRITE, owner.media.descriptor, start + step, address_of(region) + step, length)
        end_s, failed, done, sent = time.monotonic() + self._side.io_deadline_s, 0, 0, 0
        while done < len(operations):
            some = operations[sent : sent + device.depth - device.in_flight()]
            if len(some):
                device.submit(some)
                sent += len(some)
            for tag, result in device.reap(1, TICK_S).tolist():
                done += 1
                if result != int(operations["length"][tag]):
                    failed = -result if result < 0 else errno.EIO
            if time.monotonic() > end_s:
                self._hung.append((device, owner.media, region))
                self._device = self._spare = None
                raise OSError(errno.ETIMEDOUT, "the medium does not answer")
        if failed:
            raise OSError(failed, "a write failed")

    def _let_go_of_hung(self) -> None:
        """Close the devices that have answered since: the medium is back."""
        hung, self._hung = self._hung, []
        for device, medium, memory in hung:
            device.reap(1, 0)
            if device.in_flight():
                self._hung.append((device, medium, memory))
            else:
                device.close()
