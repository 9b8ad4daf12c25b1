"""Waves on real stores: times, failures that are failures, bytes that are compared, memory that is too small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rewarm.bench.destination import Destinations, cut
from rewarm.bench.payload import Payload
from rewarm.bench.populate import populate
from rewarm.bench.wave import Wave, WaveReading
from rewarm.errors import ConfigError, StorageError
from rewarm.store.contract import Buffers, Outcome, Store
from rewarm.store.devices.base import READ, Device
from rewarm.store.memory import MemoryStore
from rewarm.store.opening import open_store
from rewarm.store.transfer import BatchTransfer, Counters, settled_transfer
from rewarm.testing import FaultyDevice
from rewarm.testing.faulty import bit_flip, failure, short
from rewarm.workload.sessions import Sessions

KIB = 1 << 10
LENGTHS = (64 * KIB, 64 * KIB, 40 * KIB + 24, 64 * KIB, 4 * KIB, 64 * KIB)
"""Blocks of one session; one of them is no whole number of sectors."""
SESSIONS = Sessions(seed=5, count=6, lengths=LENGTHS)
PAYLOAD = Payload(5, max(LENGTHS))
PLENTY = 64 << 20


def filled(store: Store) -> Store:
    told: list[float] = []
    populate(store, SESSIONS, PAYLOAD, told.append)
    assert sum(told) == SESSIONS.bytes_total
    return store


def wave(store: Store, concurrency: int = 6, budget: int = PLENTY) -> tuple[WaveReading, float]:
    """A wave, and the bytes that it said had come back."""
    told: list[float] = []
    destinations = Destinations(LENGTHS, concurrency, budget)
    reading = Wave(store, SESSIONS, PAYLOAD, destinations, concurrency, told.append).run()
    return reading, sum(told)


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """URL of a pool that holds every session."""
    url = f"file://{tmp_path}?capacity=64MiB"
    with open_store(url) as store:
        filled(store)
    return url


def check_all_came_back(reading: WaveReading) -> None:
    for session, restore in enumerate(reading.restores):
        assert restore.session == session
        assert dict(restore.outcomes) == {Outcome.HIT: len(LENGTHS)}
        assert restore.hit_bytes == SESSIONS.bytes_per_session
        assert restore.wrong_blocks == 0
        assert 0 < restore.last_byte_s <= reading.seconds
        assert restore.submitted_s >= 0
        assert restore.first_byte_s is not None
        assert 0 <= restore.first_byte_s <= restore.last_byte_s
    assert reading.seconds == max(restore.last_byte_s for restore in reading.restores)


def test_every_request_of_a_wave_gets_its_prefix(pool: str) -> None:
    with open_store(pool) as store:
        reading, told = wave(store)
    check_all_came_back(reading)
    assert reading.whole
    assert told == SESSIONS.bytes_total
    assert reading.seconds <= reading.counted.at_s


def test_a_small_wave_leaves_the_other_sessions_alone(pool: str) -> None:
    with open_store(pool) as store:
        reading, _ = wave(store, concurrency=2)
        assert store.stats().hits == 2 * len(LENGTHS)
    check_all_came_back(reading)


@pytest.mark.parametrize("budget_kib", [6 * 2 * 64, 6 * 2 * 130])
def test_with_little_memory_prefixes_are_restored_in_slices(pool: str, budget_kib: int) -> None:
    with open_store(pool) as store:
        reading, told = wave(store, budget=budget_kib * KIB)
    check_all_came_back(reading)
    assert not reading.whole
    assert told == SESSIONS.bytes_total


def test_too_little_memory_is_refused_with_the_number_to_set() -> None:
    with pytest.raises(ConfigError, match=r"a wave of 6 needs 768.0 KiB .* may take 767.0 KiB"):
        Destinations(LENGTHS, 6, 767 * KIB)


def test_runs_of_blocks_fill_a_slot_and_no_more() -> None:
    assert cut([4, 4, 4, 8, 2], 8) == [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert cut([8], 8) == [range(0, 1)]


@pytest.mark.parametrize("budget", [PLENTY, 6 * 2 * 64 * KIB])
@pytest.mark.parametrize("fault", [failure, short, bit_flip])
def test_a_failed_read_is_a_failure_and_no_bytes(pool: str, fault: Callable[[], object], budget: int) -> None:
    faulty: list[FaultyDevice] = []

    def wrap(device: Device) -> Device:
        faulty.append(FaultyDevice(device, seed=1))
        faulty[-1].chance(fault(), 1.0, opcode=READ)  # type: ignore[arg-type]
        return faulty[-1]

    with open_store(pool, device_wrapper=wrap) as store:
        reading, told = wave(store, budget=budget)
    assert faulty[0].injected
    hits = sum(restore.hits for restore in reading.restores)
    assert hits == 0 or fault is bit_flip, "one flipped bit in a merged read spares the blocks beside it"
    assert hits < 6 * len(LENGTHS)
    assert all(restore.outcomes.total() == len(LENGTHS) for restore in reading.restores)
    assert sum(restore.wrong_blocks for restore in reading.restores) == 0
    assert sum(restore.hit_bytes for restore in reading.restores) <= hits * max(LENGTHS)
    assert (reading.seconds == 0) == (hits == 0)
    assert told == SESSIONS.bytes_total, "progress goes on whatever came back"


def test_a_session_that_is_not_there_is_missing() -> None:
    reading, _ = wave(MemoryStore(), concurrency=2)
    assert [dict(restore.outcomes) for restore in reading.restores] == [{Outcome.MISSING: len(LENGTHS)}] * 2


class LyingStore(MemoryStore):
    """Says hit and writes nothing, or the bytes of another block."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.swap = swap

    def load(self, keys: list[bytes], buffers: Buffers) -> BatchTransfer:  # type: ignore[override]
        if self.swap:
            super().load(keys[::-1], buffers)
        return settled_transfer(len(keys), Outcome.HIT, Counters(), loading=True)


@pytest.mark.parametrize("budget", [PLENTY, 6 * 2 * 130 * KIB])
@pytest.mark.parametrize("swap", [False, True])
def test_wrong_bytes_are_found(swap: bool, budget: int) -> None:
    store = LyingStore(swap)
    filled(store)
    destinations = Destinations(LENGTHS, 6, budget)
    for _ in range(2):
        reading = Wave(store, SESSIONS, PAYLOAD, destinations, 6, lambda done: None).run()
        assert all(restore.wrong_blocks for restore in reading.restores)


def test_right_bytes_of_an_earlier_wave_do_not_count_again(pool: str) -> None:
    destinations = Destinations(LENGTHS, 6, PLENTY)
    with open_store(pool) as store:
        reading = Wave(store, SESSIONS, PAYLOAD, destinations, 6, lambda done: None).run()
    check_all_came_back(reading)
    lying = Wave(LyingStore(swap=False), SESSIONS, PAYLOAD, destinations, 6, lambda done: None).run()
    assert sum(restore.wrong_blocks for restore in lying.restores) == 6 * len(LENGTHS)


def test_a_store_that_refuses_while_it_is_filled_ends_the_run() -> None:
    with (
        MemoryStore(capacity_bytes=32 * KIB) as store,
        pytest.raises(StorageError, match=r"did not take \d+ blocks while it was filled: refused_full"),
    ):
        populate(store, SESSIONS, PAYLOAD, lambda done: None)
