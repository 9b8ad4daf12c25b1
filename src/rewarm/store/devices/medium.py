"""What a directory lies on: the kind of file system, and whether and how O_DIRECT works there, found by trying.

Every probe leaves nothing behind: its file never has a name (O_TMPFILE), or loses it before the first byte is written.
It moves 4 KiB, or the alignment if that is larger.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rewarm.errors import ConfigError, StorageError
from rewarm.store.devices import kernel
from rewarm.store.devices.base import READ, SYNC, WRITE
from rewarm.store.devices.threads import execute

ALIGNMENT_DEFAULT = 4096
"""Assumed where the kernel does not tell (before Linux 6.1, or a file system without STATX_DIOALIGN)."""

ALIGNMENT_MIN = 512
PROBE_BYTES = 4096

NETWORK_FILESYSTEMS = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ceph",
        "lustre",
        "9p",
        "afs",
        "glusterfs",
        "beegfs",
        "gpfs",
        "virtiofs",
        "orangefs",
        "pvfs2",
        "wekafs",
        "panfs",
        "fuse",
        "fuseblk",
        "vboxsf",
        "vmhgfs",
        "prl_fs",
    ]
)
"""Their data passes a client, another host or a daemon; `fuse.anything` counts too."""

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_WORDS = 64  # struct statx: 256 bytes, as u32
_STATX_DIO_WORDS = slice(38, 40)  # stx_dio_mem_align, stx_dio_offset_align

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class Medium:
    """A directory's file system. `alignment` (bytes) is for memory, offset and length of O_DIRECT operations."""

    filesystem: str
    network: bool
    memory: bool
    direct: bool
    alignment: int
    notes: tuple[str, ...]
    writable: bool


def examine(directory: str, *, writable: bool, sample: str | None) -> Medium:
    """Look at `directory` and, if `writable`, write a nameless file there; else read `sample`, a file, if given.

    Raises `ConfigError` where there is no such directory, `StorageError` where it cannot be written or read.
    """
    kind = filesystem_type(directory)
    memory = kind in MEMORY_FILESYSTEMS
    network = kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")
    direct, alignment, notes = not memory, ALIGNMENT_DEFAULT, []
    if memory:
        notes.append(f"O_DIRECT: not used on {kind}, which is memory")
    if writable:
        try:
            direct, alignment, found = _try_direct(directory, direct)
            notes += found
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise _unusable(directory, error) from error
            # A pool that has filled its own disk must still open: it is read, and makes room by evicting.
            notes.append(f"probe: {kernel.describe(error.errno)}; what cannot be tried now is assumed")
            writable = False
    elif sample is not None:
        direct, alignment, found = _sample_direct(sample, direct)
        notes += found
    return Medium(kind, network, memory, direct, alignment, tuple(notes), writable)


def examine_file(path: str, *, direct: bool) -> Medium:
    """Look at one block device or regular file, by reading it. Raises `StorageError` where it cannot be read."""
    block = stat.S_ISBLK(os.stat(path).st_mode)
    kind = "block device" if block else filesystem_type(os.path.dirname(path))
    network = kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")
    direct, alignment, notes = _sample_direct(path, direct)
    return Medium(kind, network, kind in MEMORY_FILESYSTEMS, direct, alignment, tuple(notes), writable=False)


def filesystem_type(directory: str) -> str:
    """The type of the mount that holds `directory`, as in /proc/self/mountinfo; 'unknown' where that is not there."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise ConfigError(f"{directory} is not a directory; create it or correct the path") from error
        raise _unusable(directory, error) from error
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as lines:
            mount = next((line.split()[1] for line in lines if line.startswith(b"mnt_id:")), None)
        with open("/proc/self/mountinfo", "rb") as lines:
            for line in lines:
                if line.split(b" ", 1)[0] == mount:
                    return os.fsdecode(line.rsplit(b" - ", 1)[1].split()[0])
    except OSError:
        pass
    finally:
        os.close(fd)
    return "unknown"


@contextlib.contextmanager
def nameless_file(directory: str, flags: int) -> Iterator[int]:
    """A descriptor of a new, empty file without a name in `directory`, open for reading and writing with `flags`."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        fd = _named_then_unlinked(os.path.join(directory, f".rewarm-probe-{secrets.token_hex(8)}"), flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _named_then_unlinked(path: str, flags: int) -> int:
    # Created without O_DIRECT: a file system that refuses it may refuse after it has created the name.
    plain = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return os.open(path, flags) if flags & os.O_DIRECT else os.dup(plain)
    finally:
        os.unlink(path)
        os.close(plain)


def direct_alignment(fd: int) -> int:
    """Bytes that memory and offsets of O_DIRECT on `fd` must be aligned to; 0: the kernel says that it cannot."""
    answer = np.zeros(_STATX_WORDS, np.uint32)
    empty_path = np.zeros(1, np.uint8)
    try:
        number = kernel.number_of("statx")
    except StorageError:
        return ALIGNMENT_DEFAULT
    addresses = empty_path.ctypes.data, answer.ctypes.data
    result = kernel.call(number, fd, addresses[0], _AT_EMPTY_PATH, _STATX_DIOALIGN, addresses[1])
    if result < 0 or not int(answer[0]) & _STATX_DIOALIGN:
        return ALIGNMENT_DEFAULT
    memory, offset = (int(word) for word in answer[_STATX_DIO_WORDS])
    return max(ALIGNMENT_MIN, memory, offset) if offset else 0


def _try_direct(directory: str, direct: bool) -> tuple[bool, int, list[str]]:
    """Write and read back without a ring, so that a refusal by the medium is told from a refusal by a rung."""
    if direct:
        try:
            with nameless_file(directory, os.O_DIRECT) as fd:
                alignment = direct_alignment(fd)
                if alignment:
                    round_trip(fd, alignment, run_now)
                    return True, alignment, []
            reason = "the kernel reports none for this file system (statx)"
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            reason = kernel.describe(error.errno)
    with nameless_file(directory, 0) as fd:
        round_trip(fd, ALIGNMENT_DEFAULT, run_now)
    return False, ALIGNMENT_DEFAULT, [f"O_DIRECT: {reason}; the page cache is used"] if direct else []


def _sample_direct(sample: str, direct: bool) -> tuple[bool, int, list[str]]:
    """What `_try_direct` finds out, from reading an existing file."""
    if not direct:
        return False, ALIGNMENT_DEFAULT, []
    try:
        with open_sample(sample, direct=True) as fd:
            alignment = direct_alignment(fd)
            if alignment:
                read_back(fd, alignment, run_now)
                return True, alignment, []
        reason = "the kernel reports none for this file system (statx)"
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise _unusable(sample, error) from error
        reason = kernel.describe(error.errno)
    return False, ALIGNMENT_DEFAULT, [f"O_DIRECT: {reason}; the page cache is used"]


@contextlib.contextmanager
def open_sample(path: str, *, direct: bool) -> Iterator[int]:
    """A descriptor of `path` for reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        yield fd
    finally:
        os.close(fd)


Run = Callable[[int, int, int, int, int], int]
"""Carries one operation out: (opcode, fd, offset, address, length) -> bytes moved or a negative errno."""


def run_now(opcode: int, fd: int, offset: int, address: int, length: int) -> int:
    """A `Run` that is a plain system call. A short write is one that found no room for the rest."""
    result = execute((0, opcode, fd, offset, address, length))
    return -errno.ENOSPC if opcode == WRITE and 0 <= result < length else result


def round_trip(fd: int, alignment: int, run: Run) -> None:
    """Write random bytes, sync, read them back and compare.

    Raises `OSError` with what the kernel said, `StorageError` for wrong or missing bytes.
    """
    length = max(PROBE_BYTES, alignment)
    written, read = _Aligned(length), _Aligned(length)
    written.view[:] = np.frombuffer(os.urandom(length), np.uint8)
    with _lent(written, read):
        _expect(run(WRITE, fd, 0, written.address, length), length)
        _expect(run(SYNC, fd, 0, 0, 0), 0)
        _expect(run(READ, fd, 0, read.address, length), length)
    if not np.array_equal(written.view, read.view):
        raise StorageError("the bytes read back differ from those written")


def read_back(fd: int, alignment: int, run: Run) -> None:
    """Read the start of a file through `run` and by a plain call, and compare. Raises like `round_trip`."""
    length = max(PROBE_BYTES, alignment)
    plain, tried = _Aligned(length), _Aligned(length)
    count = run_now(READ, fd, 0, plain.address, length)
    _expect(min(count, 0), 0)
    with _lent(plain, tried):
        _expect(run(READ, fd, 0, tried.address, length), count)
    if not np.array_equal(plain.view, tried.view):
        raise StorageError("the bytes read differ from those of a plain read")


def _expect(result: int, wanted: int) -> None:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    if result != wanted:
        raise StorageError(f"{result} bytes were moved instead of {wanted}")


@contextlib.contextmanager
def _lent(*buffers: _Aligned) -> Iterator[None]:
    """Memory of operations that hang is never freed: the kernel may still write to it."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ETIMEDOUT:
            _never_freed.extend(buffers)
        raise


class _Aligned:
    """Zeroed memory whose address is a multiple of its length."""

    def __init__(self, length: int) -> None:
        whole = np.frombuffer(mmap.mmap(-1, 2 * length), np.uint8)
        skip = -whole.ctypes.data % length
        self.view = whole[skip : skip + length]
        self.address = int(self.view.ctypes.data)


_never_freed: list[_Aligned] = []


def _unusable(path: str, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be used: {kernel.describe(error.errno or 0)}")
