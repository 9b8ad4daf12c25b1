"""The owners of this process: one for each device, shared by all handles, let go with the last of them.

Becoming an owner takes long, and longer where a medium does not answer: only whoever asks for the same device waits.
"""

from __future__ import annotations

import errno
import logging
import threading

from rewarm.store import forks
from rewarm.store.raw.lease import NOBODY, Terms, acquire
from rewarm.store.raw.media import Media
from rewarm.store.raw.owner import GRACE_POLLS, Owner


class _Seat:
    """Who owns one device, and for how many handles. Its lock is held while that changes.

    `media` is what the last attempt to become the owner was made on.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.media: Media | None = None
        self.owner: Owner | None = None
        self.handles = 0


log = logging.getLogger("rewarm.store")

_lock = threading.Lock()
_seats: dict[tuple[str, int], _Seat] = {}
"""By node and number of forks."""


def share(path: str, terms: Terms, *, direct: bool, deadline_s: float, former: bytes = NOBODY) -> Owner | None:
    """The owner of a device in this process, made by acquiring the lease; None where another lives.

    `former` as for `acquire`. Raises `OSError`.
    """
    with _lock:
        seat = _seats.setdefault((terms.node, forks.count), _Seat())
    with seat.lock:
        if seat.owner is not None and seat.owner.lost:
            seat.owner.close()  # Its lock on the device must not keep its successor out.
            seat.owner = None
        if seat.owner is None:
            seat.owner, seat.handles = _become_owner(seat, path, terms, direct, deadline_s, former), 0
        seat.handles += 1
        return seat.owner


def release(owner: Owner) -> None:
    """One handle fewer."""
    with _lock:
        seat = next((seat for seat in _seats.values() if seat.owner is owner), None)
    if seat is not None:
        with seat.lock:
            if seat.owner is owner:
                seat.handles -= 1
                if seat.handles:
                    return
                owner.close()
                seat.owner = None
    owner.close()


def _become_owner(seat: _Seat, path: str, terms: Terms, direct: bool, deadline_s: float, former: bytes) -> Owner | None:
    if seat.media is not None and seat.media.overdue():
        raise TimeoutError(errno.ETIMEDOUT, "the medium has still not answered the last attempt to own it")
    media = seat.media = Media(path, writable=True, direct=direct, deadline_s=deadline_s)
    try:
        tenure = acquire(media, terms, former)
        if tenure is not None:
            fence = "reserved" if tenure.reservation.held else f"no fence: {tenure.reservation.why_not}"
            log.info("%s: this host owns the pool (%s)", path, fence)
            return Owner(media, tenure, grace_s=GRACE_POLLS * terms.poll_s)
    except OSError:
        media.close()
        raise
    media.close()
    return None
