"""The thin layer over the kernel that the devices share: raw system calls through ctypes, memory mapping, error names.

It promises that a call returns a number at least 0 or a negative errno, and that the interpreter lock is free while
the call runs (`hold_eventfd_write` alone keeps it, because that call cannot wait). It knows nothing about rings or
operations. Linux on x86-64 and arm64 only: elsewhere `number_of` raises `StorageError`, which is one refused rung.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

import numpy as np
import numpy.typing as npt

from rewarm.errors import StorageError

_NUMBERS = {
    "io_setup": {"x86_64": 206, "aarch64": 0},
    "io_destroy": {"x86_64": 207, "aarch64": 1},
    "io_submit": {"x86_64": 209, "aarch64": 2},
    "io_getevents": {"x86_64": 208, "aarch64": 4},
    "statx": {"x86_64": 332, "aarch64": 291},
    "io_uring_setup": {"x86_64": 425, "aarch64": 425},
    "io_uring_enter": {"x86_64": 426, "aarch64": 426},
    "io_uring_register": {"x86_64": 427, "aarch64": 427},
}
"""System call numbers (Linux uapi asm/unistd.h of each architecture)."""

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.argtypes = [ctypes.c_long] * 7
_syscall.restype = ctypes.c_long
_mmap = _libc.mmap
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# PyDLL keeps the interpreter lock: the call never waits, while giving the lock up beside a busy thread costs its
# caller (an engine's scheduler) a whole switch interval of 5 ms.
_eventfd_write = ctypes.PyDLL(None, use_errno=True).eventfd_write
_eventfd_write.argtypes = [ctypes.c_int, ctypes.c_uint64]

_PROT_READ_WRITE = 1 | 2
_MAP_SHARED_FIXED = 0x01 | 0x10
_MAP_PRIVATE_ANONYMOUS = 0x02 | 0x20
_MAP_SHARED_POPULATE = 0x01 | 0x8000
_MADV_DONTFORK = 10
_MAP_FAILED = ctypes.c_void_p(-1).value


def number_of(name: str) -> int:
    """The number of a system call on this machine. Raises `StorageError` where Rewarm does not know it."""
    number = _NUMBERS[name].get(platform.machine())
    if number is None:
        raise StorageError(f"{name}: no system call number known for {platform.machine()!r}; use device=threads")
    return number


def call(number: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0) -> int:
    """Make a system call with the interpreter lock released; returns its result or a negative errno."""
    result: int = _syscall(number, a, b, c, d, e, f)
    return result if result >= 0 else -ctypes.get_errno()


def hold_eventfd_write(fd: int) -> None:
    """Add one to an eventfd without giving the interpreter lock up."""
    _eventfd_write(fd, 1)


def open_eventfd(value: int = 0) -> int:
    """A close-on-exec eventfd holding `value`. Raises `StorageError`."""
    try:
        return os.eventfd(value, os.EFD_CLOEXEC)
    except OSError as error:
        raise StorageError(f"eventfd: {describe(error.errno or 0)}") from error


def describe(error: int) -> str:
    """'EPERM (Operation not permitted)' from a positive or negative errno."""
    number = abs(error)
    return f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"


def map_shared(fd: int, offset: int, length: int, unit: int) -> npt.NDArray[np.uint8]:
    """Map a shared file so that whole units of it lie on whole units of address space; it stays mapped for good.

    `offset` is a multiple of the page size, `unit` of that of huge pages. Raises `StorageError`.
    """
    room = _mmap(None, length + 2 * unit, 0, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    if room is not None and room != _MAP_FAILED:
        address = _mmap(room + (offset - room) % unit, length, _PROT_READ_WRITE, _MAP_SHARED_FIXED, fd, offset)
        if address is not None and address != _MAP_FAILED:
            return np.frombuffer(memoryview((ctypes.c_uint8 * length).from_address(address)), np.uint8)
    raise StorageError(f"mmap of {length} bytes: {describe(ctypes.get_errno())}")


def advise(address: int, length: int, advice: int) -> int:
    """madvise; 0 or a negative errno."""
    return 0 if _madvise(address, length, advice) == 0 else -ctypes.get_errno()


class Mapping:
    """Memory shared with the kernel through a descriptor, absent in forked children. Freed by `unmap` alone.

    Not `mmap.mmap`: that keeps a copy of the descriptor, which would hold a closed ring alive and leak into children.
    """

    def __init__(self, fd: int, length: int, offset: int) -> None:
        address = _mmap(None, length, _PROT_READ_WRITE, _MAP_SHARED_POPULATE, fd, offset)
        if address is None or address == _MAP_FAILED:
            raise StorageError(f"mmap of {length} bytes: {describe(ctypes.get_errno())}")
        self._address: int = address
        self._length = length
        _madvise(address, length, _MADV_DONTFORK)

    def bytes(self) -> npt.NDArray[np.uint8]:
        """A view of the memory; it must not be touched after `unmap`."""
        return np.frombuffer(memoryview((ctypes.c_uint8 * self._length).from_address(self._address)), np.uint8)

    def unmap(self) -> None:
        """Give the memory back. Call it once, in the process that mapped it."""
        _munmap(self._address, self._length)
