"""`stats` says what was done, to the byte; `lookup` does nothing but look."""

from __future__ import annotations

from pathlib import Path

from rewarm.store.contract import MISS_CAUSES, REFUSAL_CAUSES, Outcome, Store
from rewarm.testing.kit.base import CAPACITY_BYTES, WAIT_S, StoreKit, blocks_of, destinations, finish, load, save
from rewarm.testing.payload import make_keys

SIZE = 2 * 4096
"""Whole pages, so that no store needs padding."""


def _thread_io() -> str:
    """Reads, writes and bytes of the calling thread alone, as the kernel counts them."""
    return Path("/proc/thread-self/io").read_text()


class CounterTests(StoreKit):
    """Stats and lookups."""

    def test_a_new_handle_counts_from_zero(self) -> None:
        stats = self.open().stats()
        assert (stats.hits, stats.stored, stats.already, stats.blocks) == (0, 0, 0, 0)
        assert (stats.bytes_read, stats.bytes_written, stats.unreleased_bytes, stats.queued_bytes) == (0, 0, 0, 0)
        assert stats.device
        assert stats.capacity_bytes == CAPACITY_BYTES
        assert stats.misses == {cause.value: 0 for cause in MISS_CAUSES}
        assert stats.refused == {cause.value: 0 for cause in REFUSAL_CAUSES}

    def test_saves_are_counted(self) -> None:
        store, keys = self.open(), make_keys(6)
        save(store, keys[:2], SIZE)
        save(store, keys, SIZE)
        store.flush()
        stats = store.stats()
        assert (stats.stored, stats.already, stats.blocks) == (6, 2, 6)
        assert stats.bytes_written == 6 * SIZE
        assert stats.bytes_padding >= 0
        assert stats.used_bytes >= 6 * SIZE
        assert (stats.unreleased_bytes, stats.queued_bytes) == (0, 0)
        assert sum(stats.refused.values()) == 0

    def test_loads_are_counted(self) -> None:
        store, keys = self.open(), make_keys(9)
        save(store, keys[:6], SIZE)
        load(store, keys, SIZE)
        load(store, keys[:1], SIZE - 1)
        stats = store.stats()
        assert stats.hits == 6
        assert stats.misses[Outcome.MISSING] == 3
        assert stats.misses[Outcome.WRONG_SIZE] == 1
        assert sum(stats.misses.values()) == 4
        assert stats.bytes_read == 6 * SIZE
        assert stats.unreleased_bytes == 0

    def test_every_block_of_a_cancelled_load_is_counted_once(self) -> None:
        store, keys = self.open(), make_keys(200)
        save(store, keys, SIZE)
        for _ in range(5):
            transfer = store.load(keys, destinations(200, SIZE))
            transfer.cancel()
            assert transfer.wait_released(WAIT_S)
            timed = store.load(keys, destinations(200, SIZE))
            timed.wait(0)
            assert timed.wait_released(WAIT_S)
        stats = store.stats()
        assert stats.hits + sum(stats.misses.values()) == 2000
        assert stats.unreleased_bytes == 0

    def test_every_block_of_a_cancelled_save_is_counted_once(self) -> None:
        store, keys = self.open(), make_keys(200)
        transfer = store.save(keys, blocks_of(keys, SIZE))
        transfer.cancel()
        assert transfer.wait_released(WAIT_S)
        stats = store.stats()
        assert stats.stored == transfer.outcomes.count(Outcome.STORED)
        assert stats.stored + sum(stats.refused.values()) == 200
        assert stats.queued_bytes == 0

    def test_lookups_are_not_hits(self) -> None:
        store, keys = self.open(), make_keys(4)
        save(store, keys[:2], SIZE)
        before = store.stats()
        store.lookup(keys)
        assert keys[0] in store
        after = store.stats()
        assert (after.hits, after.misses, after.bytes_read) == (before.hits, before.misses, before.bytes_read)

    def test_lookup_touches_no_medium(self) -> None:
        store, keys = self.open(), make_keys(512)
        save(store, keys[::2], 4096)
        assert _still(store, keys), "lookup or stats did I/O on the calling thread"

    def test_counters_are_of_the_handle(self) -> None:
        first, second, keys = self.open("a"), self.open("b"), make_keys(2)
        save(first, keys, SIZE)
        finish(first.load(keys, destinations(2, SIZE)))
        stats = second.stats()
        assert (stats.hits, stats.stored, stats.bytes_read, stats.bytes_written) == (0, 0, 0, 0)


def _still(store: Store, keys: list[bytes]) -> bool:
    """Whether lookups leave the calling thread's I/O counters as they are, but for reading the counters."""
    _thread_io()
    idle = [_thread_io(), _thread_io()]
    cost = _difference(idle[0], idle[1])
    before = _thread_io()
    for _ in range(20):
        store.lookup(keys)
        assert keys[0] in store
        store.stats()
    return _difference(before, _thread_io()) == cost


def _difference(before: str, after: str) -> dict[str, int]:
    first, second = (dict(line.split(": ") for line in text.splitlines()) for text in (before, after))
    return {name: int(second[name]) - int(first[name]) for name in ("syscr", "syscw", "read_bytes", "write_bytes")}
