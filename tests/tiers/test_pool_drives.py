"""Drives of a pool that are lost, hang, are full, come back or are added, while the pool is used."""

from __future__ import annotations

import errno
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rewarm.errors import ConfigError
from rewarm.store.contract import Outcome, Store
from rewarm.store.devices.base import READ, WRITE, Device
from rewarm.store.memory import MemoryStore
from rewarm.store.opening import open_store
from rewarm.testing import FaultyDevice, make_keys, payload
from rewarm.testing.faulty import Kind, failure, stall
from rewarm.testing.kit.base import WAIT_S, assert_hits_are_right, blocks_of, destinations, finish, load, save
from rewarm.tiers import lane as lanes
from rewarm.tiers.pool import PoolStore

BLOCK = 256 << 10


class Drives:
    """Stores on directories, each with devices that misbehave when told to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reads: dict[str, FaultyDevice] = {}
        self.writes: dict[str, FaultyDevice] = {}

    def open(self, name: str, options: str = "") -> tuple[str, Store]:
        (self.root / name).mkdir()

        def wrap(kept: dict[str, FaultyDevice]) -> Callable[[Device], Device]:
            def wrapped(device: Device) -> Device:
                kept[name] = FaultyDevice(device)
                return kept[name]

            return wrapped

        url = f"file://{self.root / name}?capacity=64MiB{options}"
        store = open_store(url, device_wrapper=wrap(self.reads), write_device_wrapper=wrap(self.writes))
        return name, store


@pytest.fixture
def drives(tmp_path: Path) -> Drives:
    return Drives(tmp_path)


@pytest.fixture
def pool(drives: Drives) -> Iterator[PoolStore]:
    with PoolStore([drives.open("a"), drives.open("b")]) as pool:
        yield pool


def where(pool: PoolStore, keys: list[bytes]) -> dict[str, int]:
    """How many of the keys each drive holds."""
    return {lane.name: int(lane.store.lookup(keys).mask.sum()) for lane in pool._lanes}


def states(pool: PoolStore) -> dict[str, tuple[str, str]]:
    return {drive.drive: (drive.reads, drive.saves) for drive in pool.drives()}


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread, bounded."""
    never = threading.Event()
    for _ in range(1000):
        if condition():
            return
        never.wait(0.01)
    raise AssertionError("it did not come about")


def test_one_save_uses_all_drives_and_so_does_its_load(pool: PoolStore, drives: Drives) -> None:
    keys = make_keys(64)
    assert save(pool, keys, BLOCK) == [Outcome.STORED] * 64
    assert where(pool, keys) == {"a": 32, "b": 32}
    assert load(pool, keys, BLOCK) == [Outcome.HIT] * 64
    assert [lane.store.stats().hits for lane in pool._lanes] == [32, 32]


def test_a_lost_drive_costs_its_own_blocks_only(
    pool: PoolStore, drives: Drives, caplog: pytest.LogCaptureFixture
) -> None:
    keys = make_keys(64)
    save(pool, keys, BLOCK)
    on_a = pool._lanes[0].store.lookup(keys).mask
    drives.reads["a"].chance(failure(errno.ENODEV), 1.0, opcode=READ)
    with caplog.at_level(logging.WARNING, "rewarm.tiers"):
        outcomes = load(pool, keys, BLOCK)
    assert [outcome is Outcome.HIT for outcome in outcomes] == (~on_a).tolist()
    assert set(outcomes) == {Outcome.HIT, Outcome.LOST_MEDIUM}
    assert pool.lookup(keys).mask.tolist() == (~on_a).tolist(), "what cannot be read is not offered"
    assert states(pool)["a"][0] == "reads end as lost_medium"
    assert states(pool)["b"] == ("ok", "ok")
    assert any("a: avoided" in note for note in pool.stats().notes)
    assert len([record for record in caplog.records if "drive a" in record.message]) == 1

    more = make_keys(16, "more")
    assert save(pool, more, BLOCK) == [Outcome.STORED] * 16
    assert where(pool, more) == {"a": 0, "b": 16}


def test_a_drive_that_works_again_is_used_again(pool: PoolStore, drives: Drives) -> None:
    keys = make_keys(16)
    save(pool, keys, BLOCK)
    drives.reads["a"].chance(failure(errno.ENODEV), 1.0, opcode=READ)
    load(pool, keys, BLOCK)
    assert not pool.lookup(keys).mask.all()
    drives.reads["a"].heal()
    until(lambda: bool(pool.lookup(keys).mask.all()))
    assert load(pool, keys, BLOCK) == [Outcome.HIT] * 16
    assert states(pool)["a"] == ("ok", "ok")
    assert pool.stats().notes == [note for note in pool.stats().notes if "avoided" not in note]


def test_blocks_that_one_drive_cannot_write_go_to_another(pool: PoolStore, drives: Drives) -> None:
    keys = make_keys(32)
    drives.writes["a"].chance(failure(errno.EIO), 1.0, opcode=WRITE)
    assert save(pool, keys, BLOCK) == [Outcome.STORED] * 32
    assert where(pool, keys) == {"a": 0, "b": 32}
    assert states(pool)["a"] == ("ok", "writes end as lost_medium")
    assert load(pool, keys, BLOCK) == [Outcome.HIT] * 32
    assert pool.stats().stored == 32
    assert sum(pool.stats().refused.values()) == 0


def test_a_full_drive_is_passed_over(pool: PoolStore, drives: Drives) -> None:
    first, keys = make_keys(8, "first"), make_keys(32)
    save(pool, first, BLOCK)
    drives.writes["b"].chance(failure(errno.ENOSPC), 1.0, opcode=WRITE)
    with pool.pin(first):
        assert save(pool, keys, BLOCK) == [Outcome.STORED] * 32
    assert where(pool, keys) == {"a": 32, "b": 0}
    assert states(pool)["b"] == ("ok", "full")
    assert any("avoided for saves: full" in note for note in pool.stats().notes)


def test_all_drives_full_is_a_refusal_with_its_cause(pool: PoolStore, drives: Drives) -> None:
    keys = make_keys(8)
    for name in ("a", "b"):
        drives.writes[name].chance(failure(errno.ENOSPC), 1.0, opcode=WRITE)
    assert save(pool, keys, BLOCK) == [Outcome.REFUSED_FULL] * 8
    assert pool.stats().refused[Outcome.REFUSED_FULL] == 8
    assert pool.stats().queued_bytes == 0


@pytest.mark.crash
def test_a_hanging_drive_misses_within_its_bound_and_the_others_go_on(
    pool: PoolStore, drives: Drives, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(64)
    save(pool, keys, BLOCK)
    on_a = pool._lanes[0].store.lookup(keys).mask
    drives.reads["a"].chance(stall(), 1.0, opcode=READ)
    buffers = destinations(64, BLOCK)
    transfer = pool.load(keys, buffers)
    until(lambda: drives.reads["a"].injected[Kind.STALL] > 0)  # a busy machine may take long to ask the drive
    monkeypatch.setattr(lanes, "LOAD_STALL_S", 0.3)
    good = transfer.wait(WAIT_S)
    assert good == (~on_a).tolist()
    assert {o for o, lost in zip(transfer.outcomes, on_a, strict=True) if lost} == {Outcome.LOST_MEDIUM}
    assert not transfer.released(), "the kernel may still write into it"
    assert pool.stats().unreleased_bytes == 64 * BLOCK
    assert "ends none" in states(pool)["a"][0]

    rest = [key for key, lost in zip(keys, on_a, strict=True) if not lost]
    assert load(pool, rest, BLOCK) == [Outcome.HIT] * len(rest)
    drives.reads["a"].heal()
    drives.reads["a"].release_stalled()
    assert transfer.wait_released(WAIT_S)
    assert_hits_are_right(keys, buffers, transfer.outcomes)
    until(lambda: bool(pool.lookup(keys).mask.all()))
    assert load(pool, keys, BLOCK) == [Outcome.HIT] * 64


def test_a_second_copy_is_read_where_the_first_fails(pool: PoolStore, drives: Drives) -> None:
    keys = make_keys(8)
    for lane in pool._lanes:
        assert lane.store.save(keys, blocks_of(keys, BLOCK)).wait() == [True] * 8
    drives.reads["a"].chance(failure(errno.ENODEV), 1.0, opcode=READ)
    assert load(pool, keys, BLOCK) == [Outcome.HIT] * 8
    assert sum(pool.stats().misses.values()) == 0


def test_a_drive_is_added_while_the_pool_is_used(pool: PoolStore, drives: Drives) -> None:
    keys, more = make_keys(32), make_keys(48, "more")
    save(pool, keys, BLOCK)
    pool.add_drive(*drives.open("c"))
    assert save(pool, more, BLOCK) == [Outcome.STORED] * 48
    assert all(12 <= count <= 20 for count in where(pool, more).values()), "an empty drive gets its share, not all"
    assert load(pool, [*keys, *more], BLOCK) == [Outcome.HIT] * 80
    assert pool.stats().capacity_bytes == 3 * (64 << 20)
    with pytest.raises(ConfigError, match="already"):
        pool.add_drive("a", MemoryStore())


def test_a_slow_drive_gets_little_and_is_reported(pool: PoolStore) -> None:
    for lane, speed in zip(pool._lanes, (100e6, 10e6), strict=True):
        lane.meter.bytes_per_s = speed
    keys = make_keys(100)
    assert save(pool, keys, BLOCK) == [Outcome.STORED] * 100
    assert where(pool, keys)["b"] <= 16
    (note,) = pool.stats().notes
    assert note == "b: slow, 10.00 MB/s beside 100.00 MB/s; it gets 9% of what is saved"
    assert load(pool, keys, BLOCK) == [Outcome.HIT] * 100, "what it holds is still restored"


def test_memory_is_given_back_without_the_garbage_collector(pool: PoolStore) -> None:
    keys = make_keys(4)
    save(pool, keys, BLOCK)

    class Memory(np.ndarray):
        """An array that can be watched."""

    gc.disable()
    try:
        buffers = np.zeros((4, BLOCK), np.uint8).view(Memory)
        watched = weakref.ref(buffers)
        assert finish(pool.load(keys, buffers)) == [True] * 4
        assert bytes(buffers[0]) == payload(keys[0], BLOCK)
        del buffers
        until(lambda: watched() is None)
    finally:
        gc.enable()
