"""The owners of this process: one for each device, shared by all handles, let go with the last of them."""

from __future__ import annotations

import threading

from rewarm.store import forks
from rewarm.store.raw.lease import Terms, acquire
from rewarm.store.raw.media import Media
from rewarm.store.raw.owner import GRACE_POLLS, Owner

_lock = threading.Lock()
_owners: dict[tuple[str, int], tuple[Owner, int]] = {}
"""By node and number of forks, with the number of handles."""


def share(path: str, terms: Terms, *, direct: bool) -> Owner | None:
    """The owner of a device in this process, made by acquiring the lease; None where another lives.

    Raises `OSError`.
    """
    with _lock:
        key = (terms.node, forks.count)
        owner, handles = _owners.get(key, (None, 0))
        if owner is not None and not owner.lost:
            _owners[key] = owner, handles + 1
            return owner
        if owner is not None:
            owner.close()  # Its lock on the device must not keep its successor out.
        media = Media(path, writable=True, direct=direct)
        try:
            header = acquire(media, terms)
            if header is None:
                media.close()
                return None
            owner = Owner(media, header, grace_s=GRACE_POLLS * terms.poll_s)
        except OSError:
            media.close()
            raise
        _owners[key] = owner, 1
        return owner


def release(owner: Owner) -> None:
    """One handle fewer."""
    with _lock:
        for key, (mine, handles) in list(_owners.items()):
            if mine is owner:
                if handles > 1:
                    _owners[key] = mine, handles - 1
                    return
                del _owners[key]
        owner.close()
