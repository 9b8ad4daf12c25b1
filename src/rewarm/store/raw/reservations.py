"""A fence in the target: a persistent reservation, where the device offers one, keeps a late owner's writes out.

Write Exclusive, Registrants Only: everybody reads, and only hosts with a key write. A claimant registers its key before
it writes its claim; who becomes the owner reserves the device, and takes the former owner's key away. Reservations are
of whole devices and of hosts, not processes; a partition, a file, a user without the right, and most targets have none.
Then the protocol holds without it: what is late costs blocks, and is never served.
"""

from __future__ import annotations

import errno
import os
import struct

from rewarm.store.raw.media import Media

WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3
IGNORE_KEY = 1
CONFLICT = 0x18
"""What the kernel answers for a key or a reservation that is another host's."""

KEY_BYTES = 8
_REGISTRATION = struct.Struct("<QQII")
_RESERVATION = struct.Struct("<QII")
_PREEMPTION = struct.Struct("<QQII")


def _request(number: int, size: int) -> int:
    """The kernel's number for an ioctl of `linux/pr.h` that hands so many bytes over."""
    return 1 << 30 | size << 16 | ord("p") << 8 | number


REGISTER = _request(200, _REGISTRATION.size)
RESERVE = _request(201, _RESERVATION.size)
PREEMPT = _request(203, _PREEMPTION.size)
CLEAR = _request(205, _RESERVATION.size)


class Reservation:
    """The key of one claimant or owner on an open device. No method raises; `why_not` says what was refused."""

    def __init__(self, media: Media, nonce: bytes) -> None:
        self.held = False
        self.why_not = ""
        self._media = media
        self._key = key_of(nonce)
        self._registered = False

    def register(self) -> None:
        """Make this host one that may write, whatever key it had."""
        if not self._media.block:
            self.why_not = "a file has none"
            return
        self._registered = self._ask(REGISTER, _REGISTRATION.pack(self._key, self._key, IGNORE_KEY, 0)) == 0

    def take(self, former: bytes) -> None:
        """Reserve the device, if need be from the host whose owner had the nonce `former`. After `register`.

        Where that fails the key stays, so that nobody else's reservation keeps the owner from writing.
        """
        if not self._registered:
            return
        kind = WRITE_EXCLUSIVE_REGISTRANTS_ONLY
        answer = self._ask(RESERVE, _RESERVATION.pack(self._key, kind, 0))
        if answer == CONFLICT:
            answer = self._ask(PREEMPT, _PREEMPTION.pack(key_of(former), self._key, kind, 0))
        if answer == CONFLICT:  # A claimant died that had it already.
            self.clear()
            self.register()
            answer = self._ask(RESERVE, _RESERVATION.pack(self._key, kind, 0))
        self.held = answer == 0

    def release(self) -> None:
        """Take the key back, and with it the reservation."""
        if self._registered:
            self._registered = self.held = False
            self._ask(REGISTER, _REGISTRATION.pack(self._key, 0, 0, 0))

    def clear(self) -> None:
        """Take every key and reservation off the device."""
        if self._registered:
            self._registered = self.held = False
            self._ask(CLEAR, _RESERVATION.pack(self._key, 0, 0))

    def _ask(self, request: int, content: bytes) -> int:
        """0 where it was done, else the device's answer; -1 where it could not be asked."""
        try:
            answer = self._media.control(request, content)
        except OSError as error:
            self.why_not = os.strerror(error.errno or errno.EIO)
            return -1
        if answer:
            self.why_not = "held by another host" if answer == CONFLICT else f"the device answers {answer:#x}"
        return answer


def key_of(nonce: bytes) -> int:
    """The key of an owner, from the nonce that its header has; never 0, which is none."""
    return int.from_bytes(nonce[:KEY_BYTES], "little") or 1
