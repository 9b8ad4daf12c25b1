"""What is known of other files than the index: the table of segments, and a bounded cache of open descriptors."""

from __future__ import annotations

import resource
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from rewarm.store.pool import Pool, close_file, open_regular

OPEN_FILES_MAX = 256
"""Descriptors kept open: below the usual soft limit of 1,024 per process, which belongs to the host application."""

OPEN_FILES_SHARE = 4
"""Where the soft limit is lower, a quarter of it."""

NUMBERS = 1 << 32
"""Numbers of segments have four bytes."""

NO_SLOT = -1
"""Of a segment that is gone and asked for by its name: nothing of it gets into the index."""


class Segment:
    """One segment of any writer. `slot` is its number in this handle's table; fields change under the store's lock."""

    __slots__ = ("_folder", "dropped", "gone", "indexed", "number", "pins", "sealed_bytes", "slot")

    def __init__(self, slot: int, folder: Path, number: int, *, gone: bool = False) -> None:
        self._folder = folder
        self.slot = slot
        self.number = number
        self.sealed_bytes: int | None = None
        self.gone = gone
        self.indexed = False  # some entry of the index may lie in it: the index is searched only then
        self.pins = 0
        self.dropped: frozenset[int] = frozenset()

    @property
    def writer(self) -> str:
        """The id of its writer."""
        return self._folder.name

    @property
    def path(self) -> Path:
        """Where its file is."""
        return self._folder / f"{self.number:08d}.seg"


class _Segments:
    """Segments of one writer. Those that are gone are numbers only: all up to `gone_to`, and a few above."""

    def __init__(self, index: int, folder: Path) -> None:
        self.index = index
        self.folder = folder
        self.live: dict[int, Segment] = {}
        self.gone_to = 0
        self.gone: set[int] = set()

    def is_gone(self, number: int) -> bool:
        """True for one that was buried; writers count from 1."""
        return 0 < number <= self.gone_to or number in self.gone

    def bury(self, number: int) -> None:
        """From now on this one is gone."""
        self.live.pop(number, None)
        if not self.is_gone(number):
            self.gone.add(number)
        while self.gone_to + 1 in self.gone:
            self.gone_to += 1
            self.gone.remove(self.gone_to)


class SegmentTable:
    """Segments by (writer, number) and by slot; every method may be called from any thread.

    Of a segment that is gone its name is kept, so that nothing said of it later counts, and its slot, which reads under
    way may name: eight bytes, where those of a writer go in their order.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._writers: dict[str, _Segments] = {}
        self._by_index: list[_Segments] = []
        self._slots: array[int] = array("Q")  # index of the writer and number
        self._lock = threading.Lock()

    def get(self, writer: str, number: int) -> Segment:
        """The segment of that name, known from now on."""
        with self._lock:
            mine = self._writers.get(writer)
            if mine is None:
                mine = self._writers[writer] = _Segments(len(self._by_index), self._pool.writers / writer)
                self._by_index.append(mine)
            return self._get(mine, number, None)

    def __getitem__(self, slot: int) -> Segment:
        with self._lock:
            index, number = divmod(self._slots[slot], NUMBERS)
            return self._get(self._by_index[index], number, slot)

    def _get(self, mine: _Segments, number: int, slot: int | None) -> Segment:
        segment = mine.live.get(number)
        if segment is not None:
            return segment
        if mine.is_gone(number):
            return Segment(NO_SLOT if slot is None else slot, mine.folder, number, gone=True)
        segment = mine.live[number] = Segment(len(self._slots), mine.folder, number)
        self._slots.append(mine.index * NUMBERS + number)
        return segment

    def bury(self, segment: Segment) -> None:
        """Keep only the name of a segment that is gone, once no entry of the index lies in it any more."""
        with self._lock:
            self._writers[segment.writer].bury(segment.number)

    def of_writer(self, writer: str) -> list[Segment]:
        """Segments of one writer that are not gone."""
        with self._lock:
            mine = self._writers.get(writer)
            return [segment for segment in mine.live.values() if not segment.gone] if mine else []


class FileCache:
    """Descriptors of files that are read, opened on first use, the longest unused closed first."""

    def __init__(
        self,
        flags: int,
        limit: int | None = None,
        opener: Callable[[Path, int], int] = open_regular,
        close: Callable[[int], None] = close_file,
        forgotten: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._flags = flags
        self._limit = _open_files_max() if limit is None else limit
        self._opener = opener
        self._close_file = close
        self._forgotten = forgotten
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._pins: dict[Path, int] = {}
        self._doomed: set[Path] = set()
        self._lock = threading.Lock()

    def acquire(self, path: Path) -> int:
        """Descriptor of a file, not closed before `release`; over the limit where all are in use. Raises `OSError`."""
        with self._lock:
            descriptor = self._open.get(path)
            if descriptor is not None:
                self._open.move_to_end(path)
                self._pins[path] = self._pins.get(path, 0) + 1
                return descriptor
        descriptor = self._opener(path, self._flags)
        with self._lock:
            if path in self._open:
                self._close_file(descriptor)
                descriptor = self._open[path]
            self._open[path] = descriptor
            self._pins[path] = self._pins.get(path, 0) + 1
            self._trim()
        return descriptor

    def room(self) -> int:
        """How many more files may be acquired within the limit."""
        with self._lock:
            return max(self._limit - len(self._pins), 0)

    def release(self, path: Path) -> None:
        """End one `acquire`."""
        with self._lock:
            self._pins[path] -= 1
            if not self._pins[path]:
                del self._pins[path]
                if path in self._doomed:
                    self._doomed.discard(path)
                    self._close_file(self._open.pop(path))

    def forget(self, path: Path) -> None:
        """Close a file that is gone, at once or with its last reader; `forgotten` is told."""
        self._forgotten(path)
        with self._lock:
            if path in self._pins:
                self._doomed.add(path)
            elif path in self._open:
                self._close_file(self._open.pop(path))

    def close(self) -> None:
        """Close everything that no request is using, and the rest with its last request."""
        with self._lock:
            self._doomed.update(self._pins)
            for path in [path for path in self._open if path not in self._pins]:
                self._close_file(self._open.pop(path))

    def _trim(self) -> None:
        excess = len(self._open) - self._limit
        if excess > 0:
            idle = [path for path in self._open if path not in self._pins][:excess]
            for path in idle:
                self._close_file(self._open.pop(path))


def _open_files_max() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft < 0 else min(OPEN_FILES_MAX, max(soft // OPEN_FILES_SHARE, 1))


class SegmentPin:
    """Blocks that this handle will not evict until `release()`."""

    def __init__(self, mask: npt.NDArray[np.bool_], segments: list[Segment], lock: threading.RLock) -> None:
        self.mask = mask
        self._segments = segments
        self._lock = lock

    def release(self) -> None:
        """Let go; calling it twice is harmless."""
        with self._lock:
            for segment in self._segments:
                segment.pins -= 1
            self._segments = []

    def __enter__(self) -> SegmentPin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
