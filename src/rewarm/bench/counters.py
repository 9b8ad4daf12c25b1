"""What the kernel counted: bytes this process read and wrote, sectors of one block device, CPU seconds.

A `Snapshot` is taken before and after a piece of work; their difference is what the kernel says that the work cost.
`/proc/self/io` covers every thread of the process, io_uring workers included. A counter that cannot be read is None,
never zero. It does not follow child processes: the bench starts none.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import msgspec

SECTOR_BYTES = 512
"""The unit of /proc/diskstats on every device, whatever its own sector is."""

_PROCESS_IO = Path("/proc/self/io")
_DISKSTATS = Path("/proc/diskstats")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counters at one moment; bytes since the process or the device started, seconds of a steady clock."""

    at_s: float
    process_read_bytes: int | None
    process_write_bytes: int | None
    device_read_bytes: int | None
    device_write_bytes: int | None
    cpu_s: float

    def since(self, before: Snapshot) -> Snapshot:
        """What happened between `before` and this one; `at_s` becomes the seconds between them."""
        return Snapshot(
            at_s=self.at_s - before.at_s,
            process_read_bytes=_difference(self.process_read_bytes, before.process_read_bytes),
            process_write_bytes=_difference(self.process_write_bytes, before.process_write_bytes),
            device_read_bytes=_difference(self.device_read_bytes, before.device_read_bytes),
            device_write_bytes=_difference(self.device_write_bytes, before.device_write_bytes),
            cpu_s=self.cpu_s - before.cpu_s,
        )


def take_snapshot(device_number: tuple[int, int] | None = None) -> Snapshot:
    """Read all counters; `device_number` (major, minor) picks the line of /proc/diskstats, None leaves it out."""
    read, written = _process_bytes()
    device_read, device_written = _device_bytes(device_number) if device_number else (None, None)
    return Snapshot(
        at_s=time.monotonic(),
        process_read_bytes=read,
        process_write_bytes=written,
        device_read_bytes=device_read,
        device_write_bytes=device_written,
        cpu_s=_cpu_seconds(),
    )


def _cpu_seconds() -> float:
    """User and system seconds of this process, all threads, since it started."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _process_bytes() -> tuple[int | None, int | None]:
    try:
        text = _PROCESS_IO.read_text()
    except OSError:  # a kernel built without I/O accounting, or a sandbox that hides it
        return None, None
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def _device_bytes(number: tuple[int, int]) -> tuple[int | None, int | None]:
    try:
        lines = _DISKSTATS.read_text().splitlines()
    except OSError:
        return None, None
    for line in lines:
        fields = line.split()
        if (int(fields[0]), int(fields[1])) == number:
            return int(fields[5]) * SECTOR_BYTES, int(fields[9]) * SECTOR_BYTES
    return None, None


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
