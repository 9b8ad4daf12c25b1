"""Finds the device of a raw pool again after it has gone: controller removed, cable pulled, target restarted.

While the log cannot be read, the path that the user gave is looked up anew at growing intervals, because a link below
/dev/disk/by-id may lead to another device file now. What is found there counts if it is the same pool: id, geometry,
and a log no older than the one followed so far. Anything else is left alone, and `why` says what it is. Each look runs
in a thread of its own with the deadlines of the medium; one that hangs holds up nothing, and while the device keeps it
none is begun beside it, unless the path leads elsewhere.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from rewarm.errors import RewarmError
from rewarm.store.patience import Mount
from rewarm.store.raw.following import Follower
from rewarm.store.raw.header import Header
from rewarm.store.raw.media import Media, resolve
from rewarm.store.raw.slots import read_header

PAUSE_POLLS_MAX = 16
PAUSE_S_MAX = 5.0
"""Longest pause between two looks: so many polls, but no more seconds than these."""


class Reopener:
    """Used by the poller of one handle, but for `end`."""

    def __init__(self, path: str, namespace: bytes, *, direct: bool, deadline_s: float, poll_s: float) -> None:
        self.why = ""
        self._path = path
        self._namespace = namespace
        self._direct = direct
        self._deadline_s = deadline_s
        self._poll_s = poll_s
        self._mount = Mount(deadline_s)
        self._lock = threading.Lock()
        self._look: Future[int] | None = None
        self._found: Follower | None = None
        self._tried: Media | None = None
        self._looks = 0
        self._next_s = 0.0
        self._pause_s = poll_s
        self._ended = False

    def back(self) -> None:
        """The device that is open answers: begin with short pauses when it is lost the next time."""
        self.why, self._pause_s, self._next_s = "", self._poll_s, 0.0
        self._drop()

    def look(self, known: Header) -> Follower | None:
        """Begin a look where one is due; what the last one has found. Does not wait."""
        if self._look is not None:
            if not self._look.done():
                return None
            self._look = None
            with self._lock:
                found, self._found = self._found, None
            if found is not None:
                return found
        if time.monotonic() >= self._next_s and not self._is_kept():
            self._next_s = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, max(self._poll_s, min(PAUSE_POLLS_MAX * self._poll_s, PAUSE_S_MAX)))
            self._looks += 1
            name = Path(f"{self._path}~{self._looks}")
            try:
                self._look = self._mount.later(lambda: self._find(known, name))
            except OSError as error:  # the limit on threads
                self.why = str(error)
        return None

    def _is_kept(self) -> bool:
        """True while the device that the path leads to has not answered the last look."""
        tried = self._tried
        return tried is not None and tried.overdue() and os.path.realpath(self._path) == tried.path

    def end(self) -> None:
        """Look no more; what a look still finds is closed."""
        with self._lock:
            self._ended = True
        self._drop()
        self._mount.end()

    def _drop(self) -> None:
        with self._lock:
            found, self._found = self._found, None
        if found is not None:
            found.media.close()

    def _find(self, known: Header, name: Path) -> None:
        try:
            found = self._open(known, name)
        except (OSError, RewarmError) as error:
            self.why = str(error)
            return
        with self._lock:
            if not self._ended:
                self._found = found
                return
        found.media.close()

    def _open(self, known: Header, name: Path) -> Follower:
        real, _ = resolve(self._path)
        media = Media(real, writable=False, direct=self._direct, deadline_s=self._deadline_s)
        self._tried = media
        try:
            found = read_header(media)
            if found is None or not _is_same(found, known) or media.bytes < known.device_bytes:
                raise RewarmError(f"{self._path} holds {_what(found, known)}; open the pool again if that is meant")
            follower = Follower(media, found, self._namespace, name)
            follower.catch_up()
        except (OSError, RewarmError):
            media.close()
            raise
        return follower


def _is_same(found: Header, known: Header) -> bool:
    mine = (known.pool_id, known.device_bytes, known.half_bytes, known.slot_bytes, known.slots)
    theirs = (found.pool_id, found.device_bytes, found.half_bytes, found.slot_bytes, found.slots)
    return mine == theirs and found.epoch >= known.epoch


def _what(found: Header | None, known: Header) -> str:
    if found is None:
        return "no raw pool now"
    if found.pool_id != known.pool_id:
        return f"another pool now, {found.pool_id.hex()}"
    if found.epoch < known.epoch:
        return f"an older state of this pool now, epoch {found.epoch} after {known.epoch}"
    return "a pool of another size now"
