"""The hot tier: blocks of any size in one bounded mapping, least recently used first out. One process, one namespace.

It promises that blocks never take more than the mapping, that a block which is being read, written or pinned stays
where it is, and that look-ups take no lock. It is a copy of what flash holds, or (`only_here`) of what admission has
kept off flash: a block that flash has forgotten is not offered, see `offers`. Nothing of it outlives the process.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rewarm.errors import ConfigError
from rewarm.store.buffers import borrow
from rewarm.store.contract import Buffers, CheckReport, Outcome, Presence, Stats
from rewarm.store.space import Space
from rewarm.store.transfer import BatchTransfer, Counters
from rewarm.tiers.dram import map_memory

ALIGN = 4096
"""Blocks begin on pages, so that drives write from them without a copy."""

Views = list[npt.NDArray[np.uint8]]


class _Block:
    __slots__ = ("gone", "offset", "only_here", "size", "users")

    def __init__(self, offset: int, size: int, only_here: bool) -> None:
        self.offset = offset
        self.size = size
        self.only_here = only_here
        self.users = 0
        self.gone = False


class HotPin:
    """Blocks that only DRAM has, and that stay there until `release`."""

    def __init__(self, mask: npt.NDArray[np.bool_], let_go: Callable[[], None]) -> None:
        self.mask = mask
        self._let_go: Callable[[], None] | None = let_go

    def release(self) -> None:
        """Let go; calling it twice is harmless."""
        let_go, self._let_go = self._let_go, None
        if let_go:
            let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class HotStore:
    """A `Store` in memory of `capacity_bytes`. `save` is for what is not admitted to flash: its verdict is always
    `refused_admission`, kept or not; copies of what flash holds come by `keep`. Raises `ConfigError` below one page."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < ALIGN:
            raise ConfigError(f"dram must be at least {ALIGN} bytes, got {capacity_bytes}")
        self.capacity_bytes = capacity_bytes // ALIGN * ALIGN
        mapping, self.huge_pages = map_memory(self.capacity_bytes)
        self.memory = np.frombuffer(mapping, np.uint8)
        self.used_bytes = 0
        self._space = Space(self.capacity_bytes)
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._lock = threading.Lock()
        self._counters = Counters()
        self.epoch = 0
        """Counts erasures: a copy that was begun before one must not come after it."""

    # Looking. No lock: one look into a dictionary at a time is atomic.

    def offers(self, keys: Sequence[bytes], below: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which keys may be restored from here; `below` says which of them flash holds. Shape (keys,)."""
        found = [self._blocks.get(key) for key in keys]
        held = zip(found, below.tolist(), strict=True)
        return np.array([block is not None and (there or block.only_here) for block, there in held], np.bool_)

    def only_here(self, key: bytes) -> bool:
        """True for a block that admission has kept off flash."""
        block = self._blocks.get(key)
        return block is not None and block.only_here

    def lookup(self, keys: Sequence[bytes]) -> Presence:
        """What lies here, whether or not flash still holds it."""
        return Presence.of(np.array([key in self._blocks for key in keys], np.bool_))

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    # Copying.

    def load(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Copy blocks into the caller's memory, before it returns."""
        views = borrow(buffers, len(keys), writable=True).views
        outcomes = []
        with self.using(keys) as blocks:
            for block, view in zip(blocks, views, strict=True):
                outcome = Outcome.MISSING if block is None else Outcome.HIT
                if block is not None and block.size != len(view):
                    outcome = Outcome.WRONG_SIZE
                elif block is not None:
                    view[:] = self.memory[block.offset : block.offset + block.size]
                outcomes.append(outcome)
            count = sum(len(view) for view, outcome in zip(views, outcomes, strict=True) if outcome is Outcome.HIT)
        self._counters.add(bytes_read=count)
        return self._over(outcomes, loading=True)

    def save(self, keys: Sequence[bytes], buffers: Buffers) -> BatchTransfer:
        """Keep blocks that flash is not to have, as far as there is room."""
        self.keep(keys, buffers, only_here=True)
        return self._over([Outcome.REFUSED_ADMISSION] * len(keys), loading=False)

    def keep(
        self, keys: Sequence[bytes], buffers: Buffers, *, only_here: bool = False, epoch: int | None = None
    ) -> None:
        """Copy blocks in, as far as there is room; what is here already is only moved up.

        Nothing is kept of what began before the last `erase`: `epoch` is what it was then.
        """
        began = self.epoch if epoch is None else epoch
        count = 0
        for key, source in zip(keys, borrow(buffers, len(keys), writable=False).views, strict=True):
            block = self._reserve(key, len(source), only_here)
            if block is None:
                continue
            self.memory[block.offset : block.offset + block.size] = source
            count += block.size
            with self._lock:
                self._drop(key)
                self._blocks[key] = block
                if began != self.epoch:
                    self._drop(key)
        self._counters.add(bytes_written=count)

    def published(self, keys: Iterable[bytes]) -> None:
        """Flash has these now."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.only_here = False

    @contextmanager
    def using(self, keys: Sequence[bytes]) -> Iterator[list[_Block | None]]:
        """The blocks of these keys, which stay where they are meanwhile; they count as used lately."""
        blocks = self._take(keys)
        try:
            yield blocks
        finally:
            self._let_go(blocks)

    def borrow(self, keys: Sequence[bytes]) -> tuple[list[bytes], Views, Callable[[], None]]:
        """The keys that are here, their memory, and what to call when nobody reads it any more."""
        blocks = self._take(keys)
        there = [(key, block) for key, block in zip(keys, blocks, strict=True) if block is not None]
        views = [self.memory[block.offset : block.offset + block.size] for _, block in there]
        return [key for key, _ in there], views, lambda: self._let_go(blocks)

    # Keeping and dropping.

    def pin(self, keys: Sequence[bytes]) -> HotPin:
        """Keep blocks here that are nowhere else; those of flash are pinned there."""
        mask = np.array([self.only_here(key) for key in keys], np.bool_)
        blocks = self._take([key for key, mine in zip(keys, mask, strict=True) if mine])
        return HotPin(mask, lambda: self._let_go(blocks))

    def evict(self, to_bytes: int) -> int:
        """Drop what was not used for longest until at most `to_bytes` are used; returns bytes freed."""
        before = self.used_bytes
        with self._lock:
            for key in [key for key, block in self._blocks.items() if not block.users]:
                if self.used_bytes <= to_bytes:
                    break
                self._drop(key)
        return before - self.used_bytes

    def erase(self) -> int:
        """Drop everything; memory that is in use is free when its users let go. Returns bytes dropped."""
        with self._lock:
            self.epoch += 1
            dropped = sum(block.size for block in self._blocks.values())
            for key in list(self._blocks):
                self._drop(key)
        return dropped

    def check(self, *, fix: bool = False) -> CheckReport:
        """Memory is trusted, so nothing is ever found."""
        return CheckReport(True, [], [], 0, 0)

    def refresh(self) -> None:
        """Nothing to do: `offers` asks flash."""

    def register(self, arena: Any) -> int:
        """Nothing to gain."""
        return 0

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Forget everything; the mapping goes with its last user."""
        self.erase()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def stats(self) -> Stats:
        """Counters since open; `blocks` are those that are here."""
        did = self._counters
        return Stats(
            device="dram", device_refusals=[], hits=did.hits, misses=did.misses(), stored=0, already=0,
            refused=did.refused(), bytes_read=did.bytes_read, bytes_written=did.bytes_written, bytes_padding=0,
            bytes_log=0, unreleased_bytes=0, queued_bytes=0, capacity_bytes=self.capacity_bytes,
            used_bytes=self.used_bytes, blocks=len(self._blocks), visibility_bound_s=0.0,
        )  # fmt: skip

    def _over(self, outcomes: list[Outcome], *, loading: bool) -> BatchTransfer:
        transfer = BatchTransfer(len(outcomes), self._counters, loading=loading)
        for outcome in set(outcomes):
            transfer.settle([block for block, each in enumerate(outcomes) if each is outcome], outcome)
        transfer.release()
        return transfer

    def _take(self, keys: Sequence[bytes]) -> list[_Block | None]:
        with self._lock:
            blocks = [self._blocks.get(key) for key in keys]
            for key, block in zip(keys, blocks, strict=True):
                if block is not None:
                    block.users += 1
                    self._blocks.move_to_end(key)
        return blocks

    def _let_go(self, blocks: Iterable[_Block | None]) -> None:
        with self._lock:
            for block in blocks:
                if block is not None:
                    block.users -= 1
                    if block.gone and not block.users:
                        self._free(block)

    def _reserve(self, key: bytes, size: int, only_here: bool) -> _Block | None:
        """Space for a block to be copied into; None when it is here already, or there is no room."""
        with self._lock:
            held = self._blocks.get(key)
            if held is None or held.size != size:
                return self._room(size, only_here)
            self._blocks.move_to_end(key)
            held.only_here &= only_here
            return None

    def _room(self, size: int, only_here: bool) -> _Block | None:
        """Space for a block; drops what was not used for longest. None where the rest is in use. With the lock."""
        whole = -(-size // ALIGN) * ALIGN
        if whole > self.capacity_bytes:
            return None
        while (offset := self._space.take(whole)) is None:
            oldest = next((key for key, block in self._blocks.items() if not block.users), None)
            if oldest is None:
                return None
            self._drop(oldest)
        self.used_bytes += whole
        assert self.used_bytes <= self.capacity_bytes
        return _Block(offset, size, only_here)

    def _drop(self, key: bytes) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            block.gone = True
            if not block.users:
                self._free(block)

    def _free(self, block: _Block) -> None:
        whole = -(-block.size // ALIGN) * ALIGN
        self._space.give(block.offset, whole)
        self.used_bytes -= whole
