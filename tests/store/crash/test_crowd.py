"""Eight processes fill one directory for a minute: the capacity holds, and nobody evicts what others have evicted."""

from __future__ import annotations

import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.store.crash.lives import server

from rewarm.store.capacity import LOW_MARK, measure
from rewarm.store.contract import Outcome
from rewarm.store.opening import open_store
from rewarm.store.pool import Pool, segment_bytes_for
from rewarm.testing import make_keys, payload

pytestmark = pytest.mark.crash

PROCESSES = 8
SECONDS = 60.0
CAPACITY = 128 << 20
SEGMENT = segment_bytes_for(CAPACITY)
BLOCK_BYTES = 200_000
BATCH_BLOCKS = 6
PAUSE_S = 0.1
"""Between two batches: bounds what a minute writes to the disk to some gigabytes."""


def crowd(url: str, process: int, seconds: float, tell: Connection) -> None:
    """Save, and read what was saved lately, until the time is over."""
    dice, pause = random.Random(process), threading.Event()
    wrong, hits, counts, batch = 0, 0, dict.fromkeys(Outcome, 0), 0
    with open_store(url, namespace="crowd") as store:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            keys = make_keys(BATCH_BLOCKS, f"process {process} batch {batch}")
            transfer = store.save(keys, [payload(key, BLOCK_BYTES) for key in keys])
            transfer.wait(60)
            for outcome in transfer.outcomes:
                assert outcome is not None
                counts[outcome] += 1
            again = make_keys(BATCH_BLOCKS, f"process {dice.randrange(PROCESSES)} batch {dice.randrange(batch + 1)}")
            buffers = [bytearray(BLOCK_BYTES) for _ in again]
            for key, buffer, hit in zip(again, buffers, store.load(again, buffers).wait(60), strict=True):
                wrong += hit and buffer != payload(key, BLOCK_BYTES)
                hits += hit
            batch += 1
            pause.wait(PAUSE_S)
        tell.send((wrong, hits, {str(k): v for k, v in counts.items() if v}, store.stats().evicted_segments))


def test_eight_processes_keep_to_the_capacity_and_evict_no_more_than_they_must(tmp_path: Path) -> None:
    assert CAPACITY >= 4 * PROCESSES * SEGMENT
    url, context = f"file://{tmp_path}?capacity={CAPACITY}", server()
    open_store(url).close()
    pool = Pool.open(tmp_path, capacity=None, access=None)
    children, ears = [], []
    for i in range(PROCESSES):
        listen, tell = context.Pipe(duplex=False)
        child = context.Process(target=crowd, args=(url, i, SECONDS, tell))
        child.start()
        tell.close()
        children.append(child)
        ears.append(listen)
    low, most, least, was_full, pause = int(LOW_MARK * CAPACITY), 0, CAPACITY, False, threading.Event()
    while any(child.is_alive() for child in children):
        used = measure(pool).used_bytes
        most = max(most, used)
        was_full |= used >= low
        if was_full:
            least = min(least, used)
        pause.wait(0.02)
    tallies = [ear.recv() for ear in ears]
    over, under = max(most - CAPACITY, 0) / SEGMENT, max(low - least, 0) / SEGMENT
    saved = {name: sum(tally[2].get(name, 0) for tally in tallies) for tally in tallies for name in tally[2]}
    print(f"over the capacity by {over:.2f} segments, under the low mark by {under:.2f}; saves {saved}")
    print(f"hits {sum(t[1] for t in tallies)}, evicted segments {[tally[3] for tally in tallies]}")
    assert was_full
    assert sum(tally[3] for tally in tallies) > 64, "the whole pool was replaced"
    assert not any(tally[0] for tally in tallies), "wrong bytes"
    assert over <= PROCESSES, "no more than the open segments"
    assert under <= PROCESSES, "no more than one segment per process"
    assert saved["stored"] > 0.9 * sum(saved.values())
