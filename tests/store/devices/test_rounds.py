"""Thousands of rounds of saves and loads leave the process as they found it: memory, descriptors, pins, threads."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.lengths import repeated
from tests.store.faulty_store import WAIT_S, arena

from rewarm.store.contract import Outcome
from rewarm.store.file import FileStore
from rewarm.store.opening import open_store
from rewarm.testing import payload

pytestmark = pytest.mark.crash

ROUNDS = repeated(3_000, 10_000)
WARM_ROUNDS = repeated(1_000, 2_000)
BLOCK_BYTES = 8192
BLOCKS = 4
KEYS = 512
GROWTH_BYTES_MAX = 4 << 20
"""Far below what one leaked buffer a round would add (2,000 x 8 KiB = 16 MiB in the short form)."""


class Held(NamedTuple):
    """What a process holds."""

    memory_bytes: int
    descriptors: int
    pinned_bytes: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        memory, pinned = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmPin"))
        return cls(memory, len(os.listdir("/proc/self/fd")), pinned, threading.active_count())


@contextlib.contextmanager
def opened(root: Path, device: str) -> Iterator[tuple[FileStore, np.ndarray]]:
    """A store that has to evict, and an arena that it has registered."""
    store = open_store(f"file://{root}?capacity=16MiB&poll=1h&device={device}", namespace="rounds")
    assert isinstance(store, FileStore)
    blocks = arena(BLOCKS, BLOCK_BYTES)
    assert store.register(blocks) == (blocks.nbytes if device == "uring" else 0)
    with store:
        yield store, blocks


def one_round(store: FileStore, blocks: np.ndarray, dice: random.Random) -> int:
    """Save some blocks, load some: in place or through bounce memory, some cancelled, some awaited by descriptor."""
    keys = [dice.randrange(KEYS).to_bytes(32, "big") for _ in range(BLOCKS)]
    saved = store.save(list(dict.fromkeys(keys)), [payload(key, BLOCK_BYTES) for key in dict.fromkeys(keys)])
    assert saved.wait(WAIT_S)
    assert saved.wait_released(WAIT_S)
    buffers = list(blocks) if dice.random() < 0.8 else [bytearray(BLOCK_BYTES) for _ in keys]
    loaded = store.load(keys, buffers)
    chance = dice.random()
    if chance < 0.1:
        loaded.cancel()
    elif chance < 0.2:
        assert loaded.fileno() >= 0
    loaded.wait(WAIT_S)
    assert loaded.wait_released(WAIT_S)
    hits = [i for i, outcome in enumerate(loaded.outcomes) if outcome is Outcome.HIT]
    assert all(bytes(buffers[i]) == payload(keys[i], BLOCK_BYTES) for i in hits[:1])
    return len(hits)


def test_thousands_of_rounds_leave_everything_where_it_was(tmp_path: Path) -> None:
    dice, before = random.Random(6), Held.now()
    with opened(tmp_path, "uring") as (store, blocks):
        hits = sum(one_round(store, blocks, dice) for _ in range(WARM_ROUNDS))
        warm, registered = Held.now(), store.stats().registered_bytes
        hits += sum(one_round(store, blocks, dice) for _ in range(ROUNDS - WARM_ROUNDS))
        after, stats = Held.now(), store.stats()
        assert hits > ROUNDS, "the rounds hardly read anything"
        assert after.memory_bytes - warm.memory_bytes < GROWTH_BYTES_MAX
        assert after[1:] == warm[1:]
        assert warm.pinned_bytes >= registered == stats.registered_bytes == blocks.nbytes
        assert stats.unreleased_bytes == stats.queued_bytes == 0
    assert Held.now()[1:] == before[1:], "closing gave everything back"


@pytest.mark.parametrize("device", ["uring", "aio", "threads"])
def test_opening_again_and_again_leaves_everything_where_it_was(tmp_path: Path, device: str) -> None:
    dice, held = random.Random(7), []
    for number in range(30):
        with opened(tmp_path, device) as (store, blocks):
            assert all(one_round(store, blocks, dice) >= 0 for _ in range(5))
        if number % 10 == 9:
            held.append(Held.now())
    assert held[-1].memory_bytes - held[0].memory_bytes < GROWTH_BYTES_MAX
    assert held[-1].descriptors == held[0].descriptors
    assert held[-1].pinned_bytes == held[0].pinned_bytes
    assert held[-1].threads <= held[0].threads
