"""Memory that an I/O process can map, too: made here, or found to be such behind any buffer that a caller registers."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError
from rewarm.store.buffers import address_of
from rewarm.store.devices import kernel

HUGE_BYTES = 2 << 20

_MADV_COLLAPSE = 25
"""Linux 6.1; does what the settings of transparent huge pages for shared memory may leave undone."""

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")
"""A mapping in /proc/self/maps: start, end, permissions, offset, device, inode, path."""


def shared_arena(size: int) -> mmap.mmap:
    """`size` bytes of zeroed memory that a store opened with `io=process` reads into directly, once it is registered.

    Like any mapping it is a buffer (`numpy.frombuffer(arena, numpy.uint8)`), and is freed with its last reference.
    Raises `MisuseError` for a size below 1, `OSError` where memory or descriptors are used up.
    """
    if size < 1:
        raise MisuseError(f"an arena has at least one byte, got {size}")
    descriptor = os.memfd_create("rewarm-arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        arena = mmap.mmap(descriptor, size)  # keeps a descriptor of its own
    finally:
        os.close(descriptor)
    return arena


def map_part(descriptor: int, offset: int, length: int) -> tuple[npt.NDArray[np.uint8], str]:
    """Map a part of a shared file, in huge pages where the kernel makes them, and why it does not, or empty.

    Its pages come one by one and from anywhere, and a read into such memory is cut into small requests: half the speed
    of a fast disk was seen. So they are collected into huge ones here, once. Raises `StorageError`.
    """
    skip = offset % mmap.PAGESIZE
    whole = kernel.map_shared(descriptor, offset - skip, skip + length, HUGE_BYTES)
    if -(offset - skip) % HUGE_BYTES + HUGE_BYTES > len(whole):
        return whole[skip:], ""  # nothing to collect in so small a part
    whole[::HUGE_BYTES].sum()  # what is empty is not collected
    result = kernel.advise(address_of(whole), len(whole), _MADV_COLLAPSE)
    return whole[skip:], "" if result == 0 else f"no huge pages for a shared arena: {kernel.describe(result)}"


class SharedPart(msgspec.Struct, frozen=True):
    """A part of a shared file: its descriptor, which is the finder's to close, and the offset in bytes."""

    descriptor: int
    offset: int


def find_shared(address: int, length: int) -> SharedPart | str:
    """The file behind memory of this process, or why another process cannot map it."""
    found = _file_behind(address, length)
    if isinstance(found, str):
        return found
    device, inode, path, offset = found
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):
            if _is(os.fstat(descriptor), device, inode) and _writable(descriptor):
                return SharedPart(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0), offset)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if _is(os.fstat(descriptor), device, inode):
            return SharedPart(descriptor, offset)
        os.close(descriptor)
    return f"nothing leads to the file behind this memory ({path or 'it has no name'})"


def _file_behind(address: int, length: int) -> tuple[tuple[int, int], int, str, int] | str:
    """(device, inode, path, offset) of the one shared file that is mapped there without a gap."""
    at, first = address, None
    with open("/proc/self/maps") as maps:
        for line in maps:
            match = _LINE.match(line)
            if match is None or int(match[2], 16) <= at or at >= address + length:
                continue
            start, end, shared = int(match[1], 16), int(match[2], 16), match[3][3] == "s"
            file = (int(match[5], 16), int(match[6], 16)), int(match[7]), match[8].strip()
            begin = int(match[4], 16) - start + address  # where in the file the arena's first byte would be
            if start > at:
                break
            if not shared or not file[1]:
                return "it is private memory; make it with rewarm.store.process.arena.shared_arena"
            if first is not None and first != (*file, begin):
                return "it is made of several shared files"
            first, at = (*file, begin), end
    return first if first is not None and at >= address + length else "it is not mapped"


def _is(status: os.stat_result, device: tuple[int, int], inode: int) -> bool:
    return (os.major(status.st_dev), os.minor(status.st_dev)) == device and status.st_ino == inode


def _writable(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
