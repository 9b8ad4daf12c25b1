"""The device below a raw pool: opening, sizes, aligned reads and writes, and what else uses it.

Everything moves whole pages through memory of our own; a short result is an error. No call waits longer than its
deadline: what the kernel still has of it then keeps its memory, and nothing else is asked of the device meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, StorageError
from rewarm.store.buffers import aligned_region
from rewarm.store.layout import pages
from rewarm.store.patience import Mount, wait_for
from rewarm.store.pool import close_file

NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
IO_DEADLINE_S = 30.0
"""For who has none of its own: `format`, `inspect`."""


class Media:
    """One open device or fixed file. What touches it raises `OSError`, after `deadline_s` a `TimeoutError`.

    Calls run one after another in a thread of the device's own, because nothing ends a call into a device that does not
    answer. While one is overdue the next ones fail at once. Any thread may call.
    """

    def __init__(self, path: str, *, writable: bool, direct: bool, deadline_s: float = IO_DEADLINE_S) -> None:
        self.path = path
        self.direct = direct
        self.deadline_s = deadline_s
        self.descriptor = -1
        self.bytes = 0
        self.block = False
        self._closed = False
        self._mount = Mount(deadline_s)
        self._overdue: Future[int] | None = None
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_DIRECT if direct else 0)
        try:
            self._bounded(lambda: self._open(flags))
        except OSError:
            self.close()
            raise

    def _open(self, flags: int) -> int:
        self.descriptor = open_raw(Path(self.path), flags)
        self.bytes = os.lseek(self.descriptor, 0, os.SEEK_END)
        self.block = stat.S_ISBLK(os.fstat(self.descriptor).st_mode)
        return 0

    def read(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """Bytes at a page, whole pages; fewer only at the end of the device."""
        region = aligned_region(pages(count))
        return region[: self._bounded(lambda: os.preadv(self.descriptor, [region.data], offset))]

    def write(self, offset: int, data: bytes) -> None:
        """Write whole pages at a page."""
        region = aligned_region(len(data))
        region[:] = np.frombuffer(data, np.uint8)
        if self._bounded(lambda: os.pwritev(self.descriptor, [region.data], offset)) != len(data):
            raise OSError(errno.EIO, "a short write")

    def sync(self) -> None:
        """Have everything that was written on the medium."""
        self._bounded(self._sync)

    def _sync(self) -> int:
        os.fdatasync(self.descriptor)
        return 0

    def control(self, request: int, content: bytes) -> int:
        """Ask the driver something (ioctl) that takes `content`; its answer, 0 or more."""
        return self._bounded(lambda: fcntl.ioctl(self.descriptor, request, bytearray(content)))

    def lock(self) -> bool:
        """Lock the device for as long as this process lives; False where another process of this machine has it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Close it, behind a call that is overdue whenever that ends; idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            closing = self._mount.later(self._close)
            if not self.overdue():
                wait_for(closing, self.deadline_s)
        self._mount.end()

    def _close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_file(descriptor)

    def overdue(self) -> bool:
        """True while the device has a call that it has not answered in time, and with it a thread of ours."""
        return self._overdue is not None and not self._overdue.done()

    def _bounded(self, action: Callable[[], int]) -> int:
        if self.overdue():
            raise TimeoutError(errno.ETIMEDOUT, "the medium has still not answered")
        answer: list[int] = []
        call = self._mount.later(lambda: answer.append(action()))
        try:
            wait_for(call, self.deadline_s)
        except TimeoutError:
            if not call.cancel() and not call.done():
                self._overdue = call
            raise
        return answer[0]


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


def tries_direct(path: str, block: bool, deadline_s: float = IO_DEADLINE_S) -> bool:
    """True when the device can be read with O_DIRECT; a block device must be. Raises `StorageError`."""
    try:
        media = Media(path, writable=False, direct=True, deadline_s=deadline_s)
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
