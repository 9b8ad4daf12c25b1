"""Proof that nothing of a dead process is in the kernel any more: a lock on every file that it reads.

When a process dies, the kernel takes its io_uring down in the background: reads that had begun go on, and write to
shared memory long after `waitpid` (measured: ten seconds on a throttled disk). Each of them holds the open file, and a
lock of an open file (Linux: open file description lock) lasts until nothing holds it. So the I/O process locks one
byte far beyond the end of every file that it opens, a byte of its own, and whoever finds that byte free on a file
knows that no read of that file by the dead process can still write anywhere. Readers only; no other lock collides.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from pathlib import Path

_FLOCK = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, process."""

_FIRST_BYTE = 1 << 61


def new_token() -> int:
    """The byte of one I/O process."""
    return _FIRST_BYTE + secrets.randbits(48)


def bear_witness(descriptor: int, token: int) -> None:
    """Lock the byte with this open file, until the last use of it ends. Raises `OSError` where files have no locks."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, token, 1, 0))


def in_use(path: Path, token: int) -> bool:
    """True while some open file of the process with that token is in use. Raises `OSError` where that is unknown."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, token, 1, 0)
        found, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
        return bool(found != fcntl.F_UNLCK)
    finally:
        os.close(descriptor)
