"""The device below a raw pool: opening, sizes, aligned reads and writes, and what else uses it.

Everything moves whole pages through memory of our own; a short result is an error.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, StorageError
from rewarm.store.buffers import aligned_region
from rewarm.store.layout import pages
from rewarm.store.pool import close_file

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class Media:
    """One open device or fixed file. Raises `OSError` from reads and writes."""

    def __init__(self, path: str, *, writable: bool, direct: bool) -> None:
        self.path = path
        self.direct = direct
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        self.descriptor = open_raw(Path(path), flags)
        self.bytes = os.lseek(self.descriptor, 0, os.SEEK_END)

    def read(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """Bytes at a page, whole pages; fewer only at the end of the device."""
        region = aligned_region(pages(count))
        done = os.preadv(self.descriptor, [region.data], offset)
        return region[:done]

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages at a page."""
        region = aligned_region(len(data))
        region[:] = np.frombuffer(data, np.uint8)
        if os.pwritev(self.descriptor, [region.data], offset) != len(data):
            raise OSError(errno.EIO, "a short write")

    def sync(self) -> None:
        """Have everything that was written on the medium."""
        os.fdatasync(self.descriptor)

    def lock(self) -> bool:
        """Lock the device for as long as this process lives; False where another process of this machine has it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close it; idempotent."""
        if self.descriptor >= 0:
            close_file(self.descriptor)
            self.descriptor = -1


def open_raw(path: Path, flags: int) -> int:
    """Descriptor of a block device or regular file, close-on-exec. Raises `OSError`."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        close_file(descriptor)
        raise OSError(errno.ENOTBLK, "neither a block device nor a regular file")
    return descriptor


def resolve(path: str) -> tuple[str, bool]:
    """The real path of a device or file, and whether it is a block device. Raises `ConfigError`, `StorageError`."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a block device, a partition or a fixed file") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be used: {error.strerror}") from error
    if not (stat.S_ISBLK(mode) or stat.S_ISREG(mode)):
        raise ConfigError(f"{path} is neither a block device nor a regular file; a directory is a file: URL")
    return os.path.realpath(path), stat.S_ISBLK(mode)


def tries_direct(path: str, block: bool) -> bool:
    """True when the device can be read with O_DIRECT; a block device must be. Raises `StorageError`."""
    try:
        media = Media(path, writable=False, direct=True)
    except OSError as error:
        if error.errno in NO_DIRECT and not block:
            return False
        raise StorageError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        media.read(0, 4096)
    except OSError as error:
        if error.errno in NO_DIRECT and not block:
            return False
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        media.close()
    return True


def node_of(path: str, host: str) -> str:
    """Names this host, this boot and this device file: two processes of one node see each other's locks."""
    facts = os.stat(path)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{host}/{boot}/{facts.st_dev}/{facts.st_ino}"
