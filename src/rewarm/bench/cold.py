"""Was a read cold? Drops the page cache, tries whether the kernel counts, and compares claimed with counted bytes.

A cold read is `proven` when the bytes that the run accounts for are those that `/proc/self/io` counted, within 1 %,
and the block device delivered at least as many. Where the kernel does not count, or counts what a server or memory
may have answered (FUSE, tmpfs, NFS), the verdict is `not_provable`, never `proven`. It proves what the block layer of
this machine did: a cache behind it (in a drive, an array, a hypervisor) is out of its sight.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rewarm.bench.counters import Snapshot, take_snapshot
from rewarm.bench.medium import Medium
from rewarm.store.devices.medium import MEMORY_FILESYSTEMS, NETWORK_FILESYSTEMS
from rewarm.units import format_size

PROVEN = "proven"
NOT_PROVABLE = "not_provable"
FAILED = "failed"

TOLERANCE = 0.01
"""Share by which claimed and counted bytes may differ."""
_TRIAL_BYTES = 1 << 20
_MCL_CURRENT = 1


class Counting(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the kernel counts reads of a medium: `reason` says why not; `device` whether diskstats moves as well.

    With `again` the process is charged once more for a read that finds the queue of the device full and is sent again,
    as io_uring does on block devices: then the bytes beyond the claim count as far as the device delivered them.
    """

    process: bool
    device: bool
    reason: str | None = None
    again: bool = False


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a run says it read: blocks, the filling up to whole device units, and index logs."""

    payload: int
    padding: int
    log: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.payload + self.padding + self.log


def drop_page_cache(files: Iterable[Path]) -> None:
    """Write back and forget the cached pages of these files; files that have gone are passed over."""
    for path in files:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            os.fdatasync(descriptor)  # a dirty page is not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def kept_resident() -> Iterator[None]:
    """Keep the pages of this process in memory where the kernel allows it: under pressure its own code is dropped and
    read again from a disk, and the kernel counts that as reads of the process."""
    c = ctypes.CDLL(None)
    locked = c.mlockall(_MCL_CURRENT) == 0  # needs root or a large RLIMIT_MEMLOCK; without, it is as it was
    try:
        yield
    finally:
        if locked:
            c.munlockall()


def try_counting(folder: Path, medium: Medium) -> Counting:
    """Find out by a real file in `folder`, read twice, whether the kernel counts reads of this medium."""
    path = folder / "counting-trial"

    def read_twice() -> list[Snapshot]:
        try:
            return _written_and_read_twice(path, medium.device_number)
        finally:
            path.unlink(missing_ok=True)

    return _counting(medium, read_twice)


def try_counting_of(device: Path, medium: Medium) -> Counting:
    """The same by reading a device, or a file that stands for one; nothing is written."""

    def read_twice() -> list[Snapshot]:
        try:
            descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file where O_DIRECT does not exist
            descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_twice(descriptor, mmap.mmap(-1, _TRIAL_BYTES), medium.device_number)
        finally:
            os.close(descriptor)

    return msgspec.structs.replace(_counting(medium, read_twice), again=device.is_block_device())


def _counting(medium: Medium, read_twice: Callable[[], list[Snapshot]]) -> Counting:
    kind = medium.file_system
    if kind in MEMORY_FILESYSTEMS:
        return Counting(process=False, device=False, reason=f"{kind} is memory, there is no cold read")
    if kind in NETWORK_FILESYSTEMS or kind.startswith("fuse."):
        return Counting(process=False, device=False, reason=f"{kind}: the other side may answer from its memory")
    readings = read_twice()
    if any(reading.process_read_bytes is None for reading in readings):
        return Counting(process=False, device=False, reason="/proc/self/io cannot be read")
    if not all(_close(reading.process_read_bytes or 0, _TRIAL_BYTES) for reading in readings):
        counted = [reading.process_read_bytes for reading in readings]
        return Counting(
            process=False, device=False, reason=f"{kind}: the kernel counted {counted} of two reads of 1 MiB"
        )
    return Counting(process=True, device=all((reading.device_read_bytes or 0) >= _TRIAL_BYTES for reading in readings))


def judge(claim: Claim, counted: Snapshot, counting: Counting) -> tuple[str, str]:
    """The verdict on one measurement and the sentence that explains it."""
    if not counting.process or counted.process_read_bytes is None:
        return NOT_PROVABLE, counting.reason or "the kernel does not count"
    process = counted.process_read_bytes
    if counting.again and counting.device and counted.device_read_bytes is not None:
        process = min(process, max(counted.device_read_bytes, claim.total))
    if not _close(process, claim.total):
        return FAILED, (
            f"the run claims {claim.total} bytes and the kernel counted {process} for this process: "
            f"{'some came from memory' if process < claim.total else 'something else was read as well'}"
        )
    if not counting.device or counted.device_read_bytes is None:
        return PROVEN, "bytes of /proc/self/io agree; diskstats has no counter for this medium"
    if counted.device_read_bytes < process * (1 - TOLERANCE):
        return FAILED, f"the block device delivered {counted.device_read_bytes} bytes of {process}"
    return PROVEN, "bytes of /proc/self/io agree, and the block device delivered at least as many"


def working_set_note(working_set_bytes: int) -> str:
    """What the size of the working set beside the machine's memory says about coldness."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = f"working set {format_size(working_set_bytes)}, memory {format_size(memory)}"
    if working_set_bytes > memory:
        return f"{sizes}: memory cannot hold it"
    return f"{sizes}: memory could hold it, so cold rests on the dropped page cache and the kernel's counters"


def _close(counted: int, claimed: int) -> bool:
    return abs(counted - claimed) <= TOLERANCE * claimed


def _written_and_read_twice(path: Path, device_number: tuple[int, int] | None) -> list[Snapshot]:
    """What the kernel counted for two reads of a fresh file, each past the page cache where the medium allows it."""
    buffer = mmap.mmap(-1, _TRIAL_BYTES)
    buffer.write(os.urandom(_TRIAL_BYTES))
    path.touch(mode=0o600)
    direct = _opens_direct(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct)
    try:
        os.pwrite(descriptor, buffer, 0)
        os.fsync(descriptor)
        return _read_twice(descriptor, buffer, device_number)
    finally:
        os.close(descriptor)


def _read_twice(descriptor: int, buffer: mmap.mmap, device_number: tuple[int, int] | None) -> list[Snapshot]:
    readings = []
    for _ in range(2):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        before = take_snapshot(device_number)
        os.preadv(descriptor, [buffer], 0)
        readings.append(take_snapshot(device_number).since(before))
    return readings


def _opens_direct(path: Path) -> int:
    """O_DIRECT where the file system takes it, else 0."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT))
    except OSError:
        return 0
    return os.O_DIRECT
