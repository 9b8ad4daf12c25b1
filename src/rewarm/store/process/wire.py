"""What the engine's process and its I/O process say to each other: short messages, and tables of blocks between them.

A message is a datagram on a socket pair. What a load wants is a table in memory that both map: places, addresses and
checksums go in, one byte a block comes back. Beside a busy thread each release of the interpreter lock costs its caller
5 ms, so on the engine's side nothing here gives it up: calls that never wait keep it, and numpy keeps it for up to
`STEP_ROWS` elements.

Memory order. A table is written before the message that names it is sent, and a verdict after the bytes that it is
about; sending and receiving a message order what comes before and after them on every architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

import msgspec
import numpy as np
import numpy.typing as npt

STEP_ROWS = 480
"""Numpy gives the interpreter lock up for more than 500 elements."""

TABLES_BYTES = 64 << 20
"""Room for all tables, 1.3 million blocks; memory is used only for what was needed at once."""

PAYLOAD_MAX = 8192
"""Longest path in a message, with room to spare (PATH_MAX is 4096)."""

LOAD, CANCEL, ARENA, NAME, FORGET, PING = range(6)
"""To the I/O process: rows of a table, give a load up, a shared arena (with its descriptor), the path of a segment, a
path that is gone, a sign of life wanted.

LOAD: number, table offset, rows of the table, first row, end; the payload `LAST` says that no more rows come.
"""

LAST = b"last"

HELLO, OVER, ARENA_READY, PONG = range(10, 14)
"""To the engine: ready (or, with a text, not), all rows have verdicts, an arena's bytes pinned and address, alive.

OVER: number, 1 when the memory is released, bytes read, bytes of padding since the last one.
"""

_FORMAT = struct.Struct("<IIqqqq")
_COLUMN_BYTES = 8 * 4 + 16 + 1
_HEAD_BYTES = 64
_ALIGN = 64

_held = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter lock: neither call can wait
_send, _recv = _held.send, _held.recv
_send.argtypes = _recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_send.restype = _recv.restype = ctypes.c_ssize_t


class Message(msgspec.Struct, frozen=True):
    """One message; the numbers mean what the kind says."""

    kind: int
    number: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    payload: bytes = b""

    def packed(self) -> bytes:
        """As a datagram."""
        return _FORMAT.pack(self.kind, self.number, self.a, self.b, self.c, self.d) + self.payload


def unpack(datagram: bytes) -> Message:
    """A message from a datagram of the other side."""
    kind, number, a, b, c, d = _FORMAT.unpack_from(datagram)
    return Message(kind, number, a, b, c, d, datagram[_FORMAT.size :])


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends; an end that closes is seen by the other."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_now(descriptor: int, datagram: bytes) -> bool:
    """Send without waiting and without giving the interpreter lock up; False where there is no room now.

    Raises `OSError` when the other side is gone.
    """
    if _send(descriptor, datagram, len(datagram), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) >= 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EAGAIN, errno.EINTR, errno.ENOBUFS):
        return False
    raise OSError(error, os.strerror(error))


def receive_now(descriptor: int, room: ctypes.Array[ctypes.c_char]) -> bytes | None:
    """A datagram that is there, without giving the interpreter lock up; None where there is none.

    Empty at the end. Raises `OSError`.
    """
    count = _recv(descriptor, room, len(room), socket.MSG_DONTWAIT)
    if count >= 0:
        return room.raw[:count]
    error = ctypes.get_errno()
    if error in (errno.EAGAIN, errno.EINTR):
        return None
    raise OSError(error, os.strerror(error))


class Table:
    """Blocks of one load, a row each: columns over `rows` rows that begin `at` bytes into the shared memory.

    `code` holds verdicts as in `store.transfer`; `first_verdict_s` is monotonic time, 0 before there is one.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], at: int, rows: int) -> None:
        self.at, self.rows = at, rows
        self.first_verdict_s = memory[at : at + 8].view(np.float64)
        start = at + _HEAD_BYTES

        def column(bytes_each: int) -> npt.NDArray[np.uint8]:
            nonlocal start
            start += rows * bytes_each
            return memory[start - rows * bytes_each : start]

        self.segment: npt.NDArray[np.int64] = column(8).view(np.int64)
        self.offset: npt.NDArray[np.int64] = column(8).view(np.int64)
        self.address: npt.NDArray[np.int64] = column(8).view(np.int64)
        self.length: npt.NDArray[np.int64] = column(8).view(np.int64)
        self.checksum = column(16).view("V16")
        self.code = column(1)


def table_bytes(rows: int) -> int:
    """Bytes of a table."""
    return -(-(_HEAD_BYTES + rows * _COLUMN_BYTES) // _ALIGN) * _ALIGN
