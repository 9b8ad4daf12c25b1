"""Completions that come late: memory that was given back is never written, and never read, afterwards."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.lengths import repeated

from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.store.devices.base import READ, WRITE, Device
from rewarm.store.opening import open_store
from rewarm.testing import FaultyDevice, make_keys, payload
from rewarm.testing.faulty import late, stall

pytestmark = pytest.mark.crash

ROUNDS = repeated(100, 300)
LATE_S = 0.05
WAIT_S = 60.0
TURN_S = 0.01
BLOCKS = 24
BLOCK_BYTES = 48 << 10
GIVEN_BACK = 0x5A


class Bench:
    """A store whose devices misbehave when told to."""

    def __init__(self, root: Path, options: str = "") -> None:
        self.devices: list[FaultyDevice] = []
        url = f"file://{root}?capacity=4GiB{options}"
        self.store: Store = open_store(
            url, namespace="late", device_wrapper=self._wrap, write_device_wrapper=self._wrap
        )

    def _wrap(self, device: Device) -> Device:
        self.devices.append(FaultyDevice(device, seed=len(self.devices)))
        return self.devices[-1]

    def release_stalled(self) -> int:
        return sum(device.release_stalled() for device in self.devices)

    def release(self, transfer: Transfer) -> None:
        """Let what hangs complete, also what the loop submits only now, until the memory is the caller's again."""
        deadline_s = time.monotonic() + WAIT_S
        while not transfer.wait_released(TURN_S):
            assert time.monotonic() < deadline_s, "not released although every read and write completes"
            self.release_stalled()

    def heal(self) -> None:
        for device in self.devices:
            device.heal()


def _fresh(dice: random.Random) -> tuple[npt.NDArray[np.uint8], list[npt.NDArray[np.uint8]]]:
    """An arena and its blocks: aligned to pages, so that they are read in place, or off by some bytes."""
    arena = np.zeros(BLOCKS * BLOCK_BYTES + 8192, np.uint8)
    start = -arena.ctypes.data % 4096 + dice.choice([0, 0, 1, 512])
    blocks = [arena[start + i * BLOCK_BYTES : start + (i + 1) * BLOCK_BYTES] for i in range(BLOCKS)]
    return arena, blocks


def _hits_are_right(keys: list[bytes], blocks: list[npt.NDArray[np.uint8]], outcomes: list[Outcome | None]) -> None:
    for key, block, outcome in zip(keys, blocks, outcomes, strict=True):
        assert outcome is not Outcome.HIT or block.tobytes() == payload(key, BLOCK_BYTES)


def _give_up(transfer: Transfer, dice: random.Random) -> None:
    if dice.random() < 0.5:
        transfer.cancel()
    else:
        transfer.wait(dice.random() * LATE_S)
    assert transfer.done()


def test_late_reads_never_touch_memory_that_was_given_back(tmp_path: Path) -> None:
    bench, dice = Bench(tmp_path), random.Random(1)
    keys = make_keys(BLOCKS)
    assert all(bench.store.save(keys, [payload(key, BLOCK_BYTES) for key in keys]).wait(WAIT_S))
    given_back: list[npt.NDArray[np.uint8]] = []
    struck = 0
    for turn in range(ROUNDS):
        fault = late(dice.random() * LATE_S) if turn % 3 else stall()
        for device in bench.devices:
            device.chance(fault, 0.4, opcode=READ)
        arena, blocks = _fresh(dice)
        transfer = bench.store.load(keys, blocks)
        _give_up(transfer, dice)
        outcomes = transfer.outcomes
        _hits_are_right(keys, blocks, outcomes)
        struck += outcomes.count(Outcome.TIMED_OUT) + outcomes.count(Outcome.CANCELLED)
        bench.heal()
        if transfer.released():
            arena[:] = GIVEN_BACK
        bench.release(transfer)
        assert transfer.outcomes == outcomes, "a verdict is final"
        arena[:] = GIVEN_BACK
        given_back.append(arena)
    assert struck > ROUNDS
    bench.store.close()
    assert bench.store.stats().unreleased_bytes == 0
    for arena in given_back:
        assert (arena == GIVEN_BACK).all(), "memory that was given back has changed"


def test_late_writes_never_read_memory_that_was_given_back(tmp_path: Path) -> None:
    bench, dice = Bench(tmp_path), random.Random(2)
    saved: list[bytes] = []
    struck = 0
    for turn in range(ROUNDS):
        fault = late(dice.random() * LATE_S) if turn % 3 else stall()
        for device in bench.devices:
            device.chance(fault, 0.4, opcode=WRITE)
        arena, blocks = _fresh(dice)
        keys = make_keys(BLOCKS, f"turn {turn}")
        for key, block in zip(keys, blocks, strict=True):
            block[:] = np.frombuffer(payload(key, BLOCK_BYTES), np.uint8)
        transfer = bench.store.save(keys, blocks)
        _give_up(transfer, dice)
        outcomes = transfer.outcomes
        bench.heal()
        if transfer.released():
            arena[:] = GIVEN_BACK
        bench.release(transfer)
        arena[:] = GIVEN_BACK
        saved += [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.STORED]
        struck += outcomes.count(Outcome.TIMED_OUT) + outcomes.count(Outcome.CANCELLED)
    assert struck > ROUNDS
    assert saved
    everything = [key for turn in range(ROUNDS) for key in make_keys(BLOCKS, f"turn {turn}")]
    bench.store.close()
    with open_store(f"file://{tmp_path}", namespace="late") as store:
        _load_all(store, saved, must_hit=True)
        _load_all(store, everything, must_hit=False)
        report = store.check()
        assert report.clean, report.findings


def _load_all(store: Store, keys: list[bytes], *, must_hit: bool) -> None:
    for start in range(0, len(keys), BLOCKS):
        some = keys[start : start + BLOCKS]
        buffers = [np.zeros(BLOCK_BYTES, np.uint8) for _ in some]
        transfer = store.load(some, buffers)
        transfer.wait(WAIT_S)
        _hits_are_right(some, buffers, transfer.outcomes)
        allowed = {Outcome.HIT} if must_hit else {Outcome.HIT, Outcome.MISSING}
        assert set(transfer.outcomes) <= allowed, transfer.outcomes


def test_memory_is_kept_while_the_medium_hangs(tmp_path: Path) -> None:
    bench, dice = Bench(tmp_path, "&close_timeout=1s"), random.Random(3)
    keys = make_keys(BLOCKS)
    assert all(bench.store.save(keys, [payload(key, BLOCK_BYTES) for key in keys]).wait(WAIT_S))
    for device in bench.devices:
        device.chance(stall(), 1.0, opcode=READ)
    arena, blocks = _fresh(dice)
    transfer = bench.store.load(keys, blocks)
    assert transfer.wait(0.2) == [False] * BLOCKS
    assert transfer.outcomes == [Outcome.TIMED_OUT] * BLOCKS
    if not transfer.released():
        assert bench.store.stats().unreleased_bytes > 0
    bench.store.close()
    back = transfer.released()
    arena[:] = GIVEN_BACK
    bench.heal()
    assert bench.release_stalled() > 0
    if back:
        assert (arena == GIVEN_BACK).all(), "close gave memory back that a read still writes to"


def test_other_requests_go_on_beside_one_that_hangs(tmp_path: Path) -> None:
    bench, dice = Bench(tmp_path), random.Random(4)
    keys = make_keys(BLOCKS)
    assert all(bench.store.save(keys, [payload(key, BLOCK_BYTES) for key in keys]).wait(WAIT_S))
    for device in bench.devices:
        device.next(stall(), opcode=READ)
    _, hung_blocks = _fresh(dice)
    hung = bench.store.load(keys[:1], hung_blocks[:1])
    for _ in range(20):
        _, blocks = _fresh(dice)
        transfer = bench.store.load(keys[1:], blocks[1:])
        assert transfer.wait(WAIT_S) == [True] * (BLOCKS - 1)
        _hits_are_right(keys[1:], blocks[1:], transfer.outcomes)
    assert not hung.done()
    assert bench.release_stalled() == 1
    assert hung.wait(WAIT_S) == [True]
    assert hung_blocks[0].tobytes() == payload(keys[0], BLOCK_BYTES)
    bench.store.close()
