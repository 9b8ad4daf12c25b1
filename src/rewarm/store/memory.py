"""The reference store: a dictionary in this process, with the whole contract and nothing else.

It promises to be obviously right: the conformance kit and the state machine of `rewarm.testing` hold other stores to
it. Every batch is carried out before `load` or `save` returns, one lock guards a pool, and nothing outlives the
process. It does not try to be fast and keeps no checksums: memory is trusted here.
A pool with a name is shared by all handles of the process that open this name, and lives as long as one of them.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError, MisuseError
from rewarm.store import forks
from rewarm.store.buffers import borrow
from rewarm.store.contract import (
    SAVE_QUEUE_BYTES,
    Buffers,
    CheckReport,
    Outcome,
    Presence,
    Stats,
    check_keys,
    resolve_namespace,
)
from rewarm.store.transfer import BatchTransfer, Counters

CAPACITY_BYTES_DEFAULT = 1 << 30
"""Memory is not bounded by a medium; a store that nobody gave a capacity must not take the whole machine."""

_Place = tuple[bytes, bytes]
"""Namespace and key, compared whole."""


@dataclass(eq=False)
class _Pool:
    """Blocks of all namespaces, oldest first."""

    capacity_bytes: int
    blocks: dict[_Place, bytes] = field(default_factory=dict)
    used_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, place: _Place, block: bytes) -> None:
        """Keep a block."""
        self.blocks[place] = block
        self.used_bytes += len(block)

    def drop(self, place: _Place) -> int:
        """Let a block go; returns its bytes."""
        freed = len(self.blocks.pop(place))
        self.used_bytes -= freed
        return freed


# A name means the same pool to every handle of the process, so the table is of the process; it keeps no pool alive.
_named: weakref.WeakValueDictionary[str, _Pool] = weakref.WeakValueDictionary()
_named_lock = threading.Lock()


def _open_pool(name: str | None, capacity_bytes: int | None) -> _Pool:
    if capacity_bytes is not None and capacity_bytes <= 0:
        raise ConfigError(f"capacity must be above 0 bytes, got {capacity_bytes}")
    with _named_lock:
        pool = _named.get(name) if name else None
        if pool is None:
            pool = _Pool(capacity_bytes or CAPACITY_BYTES_DEFAULT)
            if name:
                _named[name] = pool
    if capacity_bytes not in (None, pool.capacity_bytes):
        raise ConfigError(
            f"memory:{name} was made with capacity {pool.capacity_bytes}, not {capacity_bytes}; leave capacity out"
        )
    return pool


class MemoryPin:
    """Blocks that one handle leaves alone when it evicts."""

    def __init__(self, mask: npt.NDArray[np.bool_], release: Callable[[], None]) -> None:
        self.mask = mask
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let go; calling it twice is harmless."""
        release, self._release = self._release, None
        if release:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class MemoryStore:
    """A store in this process's memory; `name` makes handles share one pool.

    `capacity_bytes` counts payload over all namespaces of the pool, 1 GiB by default; `queue_bytes` is the most that
    one `save` may hand over. Raises `ConfigError` for a capacity that differs from the one of the named pool.
    """

    def __init__(
        self,
        namespace: object = None,
        *,
        name: str | None = None,
        capacity_bytes: int | None = None,
        queue_bytes: int = SAVE_QUEUE_BYTES,
    ) -> None:
        self._namespace, _ = resolve_namespace(namespace)
        self._pool: _Pool = _open_pool(name, capacity_bytes)
        self._queue_bytes = queue_bytes
        self._forks = forks.count
        self._closed = False
        self._pinned: Counter[_Place] = Counter()
        self._counters = Counters()

    def lookup(self, keys: Sequence[bytes]) -> Presence:
        """Which keys are held."""
        places = self._places(keys)
        with self._pool.lock:
            return Presence.of(np.array([place in self._pool.blocks for place in places], dtype=np.bool_))

    def __contains__(self, key: bytes) -> bool:
        return bool(self.lookup([key]).leading)

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Copy blocks into the caller's buffers, before it returns."""
        places = self._places(keys)
        views = borrow(buffers, len(places), writable=True).views
        with self._pool.lock:
            outcomes = [self._load_one(place, view) for place, view in zip(places, views, strict=True)]
        return self._over(outcomes, loading=True)

    def save(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Copy blocks into the pool, before it returns; the oldest make room for the new."""
        places = self._places(keys)
        borrowed = borrow(buffers, len(places), writable=False)
        queued_bytes = np.cumsum(borrowed.lengths)
        with self._pool.lock:
            outcomes = [self._save_one(*block) for block in zip(places, borrowed.views, queued_bytes, strict=True)]
        return self._over(outcomes, loading=False)

    def pin(self, keys: Sequence[bytes]) -> MemoryPin:
        """Keep this handle from evicting the blocks of these keys."""
        places = self._places(keys)
        with self._pool.lock:
            mask = np.array([place in self._pool.blocks for place in places], dtype=np.bool_)
            held = [place for place, there in zip(places, mask, strict=True) if there]
            self._pinned.update(held)
        return MemoryPin(mask, lambda: self._unpin(held))

    def evict(self, to_bytes: int) -> int:
        """Drop blocks, oldest first, until at most `to_bytes` are used; returns bytes freed."""
        self._check_usable()
        if to_bytes < 0:
            raise MisuseError(f"to_bytes must be 0 or more, got {to_bytes}")
        with self._pool.lock:
            return self._evict(to_bytes)

    def erase(self) -> int:
        """Remove every block of this namespace, pinned or not; returns bytes freed."""
        self._check_usable()
        with self._pool.lock:
            mine = [place for place in self._pool.blocks if place[0] == self._namespace]
            return sum(self._pool.drop(place) for place in mine)

    def check(self, *, fix: bool = False) -> CheckReport:
        """Count what is there: memory is trusted, so nothing is ever found."""
        self._check_usable()
        with self._pool.lock:
            return CheckReport(True, [], [], len(self._pool.blocks), self._pool.used_bytes)

    def refresh(self) -> None:
        """Nothing to do: handles of a pool share its dictionary."""
        self._check_usable()

    def register(self, arena: object) -> int:
        """Has no effect on memory, and says so: 0."""
        self._check_usable()
        return 0

    def stats(self) -> Stats:
        """Counters since open; bytes are payload bytes."""
        self._check_usable()
        did = self._counters
        with self._pool.lock:
            return Stats(
                device="memory",
                device_refusals=[],
                hits=did.hits,
                misses=did.misses(),
                stored=did.saved(Outcome.STORED),
                already=did.saved(Outcome.ALREADY),
                refused=did.refused(),
                bytes_read=did.bytes_read,
                bytes_written=did.bytes_written,
                bytes_padding=0,
                bytes_log=0,
                unreleased_bytes=0,
                queued_bytes=0,
                capacity_bytes=self._pool.capacity_bytes,
                used_bytes=self._pool.used_bytes,
                blocks=sum(place[0] == self._namespace for place in self._pool.blocks),
                visibility_bound_s=0.0,
                evicted_bytes=did.evicted_bytes,
                notes=["register has no effect on memory"],
            )

    def flush(self) -> None:
        """Nothing to do: a save is over before it returns."""
        self._check_usable()

    def close(self) -> None:
        """End this handle; a named pool goes with its last one."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise MisuseError("this store is closed; open it again")
        if forks.count != self._forks:
            raise MisuseError("this store was opened before fork; open it in the child process")

    def _places(self, keys: Sequence[bytes]) -> list[_Place]:
        self._check_usable()
        check_keys(keys)
        return [(self._namespace, key) for key in keys]

    def _over(self, outcomes: list[Outcome], *, loading: bool) -> BatchTransfer:
        transfer = BatchTransfer(len(outcomes), self._counters, loading=loading)
        for block, outcome in enumerate(outcomes):
            transfer.settle([block], outcome)
        transfer.release()
        return transfer

    def _load_one(self, place: _Place, view: npt.NDArray[np.uint8]) -> Outcome:
        block = self._pool.blocks.get(place)
        if block is None:
            return Outcome.MISSING
        if len(block) != len(view):
            return Outcome.WRONG_SIZE
        view[:] = np.frombuffer(block, dtype=np.uint8)
        self._counters.add(bytes_read=len(block))
        return Outcome.HIT

    def _save_one(self, place: _Place, view: npt.NDArray[np.uint8], queued_bytes: int) -> Outcome:
        if place in self._pool.blocks:
            return Outcome.ALREADY
        if queued_bytes > self._queue_bytes:
            return Outcome.REFUSED_BUDGET
        room = self._pool.capacity_bytes - len(view)
        if self._pool.used_bytes > room >= 0:
            self._evict(room)
        if self._pool.used_bytes > room:
            return Outcome.REFUSED_FULL
        self._pool.add(place, view.tobytes())
        self._counters.add(bytes_written=len(view))
        return Outcome.STORED

    def _evict(self, to_bytes: int) -> int:
        """Drop oldest first, but nothing that this handle has pinned; the pool's lock is held."""
        freed = 0
        for place in list(self._pool.blocks):
            if self._pool.used_bytes <= to_bytes:
                break
            if not self._pinned[place]:
                freed += self._pool.drop(place)
        self._counters.add(evicted_bytes=freed)
        return freed

    def _unpin(self, places: list[_Place]) -> None:
        with self._pool.lock:
            self._pinned.subtract(places)
