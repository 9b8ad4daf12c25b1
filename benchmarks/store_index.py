"""Opening a million blocks, and looking them up: seconds, microseconds, bytes per block.

    python benchmarks/store_index.py [--directory DIR] [--blocks 1000000]

Writes real logs (32-byte keys, frames of up to 1,000 entries, 16 writers) without the payload they name, opens the
pool in a fresh process each time, and looks up known and unknown keys in random order. Medians of five.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rewarm.store.layout import Kind, encode_open, encode_segment_header, entry_dtype
from rewarm.store.log import LogWriter
from rewarm.store.opening import open_store
from rewarm.store.pool import Pool

WRITERS = 16
FRAME_ENTRIES = 1000
SEGMENT_BLOCKS = 4000
KEY_BYTES = 32
BATCH = 4096


def key_block(seed: int, count: int) -> np.ndarray:
    """Reproducible keys, shape (count, 32)."""
    return np.random.default_rng(seed).integers(0, 256, (count, KEY_BYTES), np.uint8)


def make_pool(root: Path, blocks: int) -> None:
    """Logs of 16 writers that name `blocks` blocks, and the segments' first pages."""
    open_store(f"file://{root}?capacity=64TiB").close()
    pool = Pool.open(root, capacity=None, access=None)
    pool.make_directory(pool.writers)
    for number in range(WRITERS):
        writer = f"{number:032x}"
        directory = pool.writers / writer
        pool.make_directory(directory)
        log = LogWriter(pool, writer, direct=False)
        log.append(Kind.OPEN, encode_open(pool.pool_id, pool.facts.capacity_bytes, pool.facts.segment_bytes), 1)
        count = blocks // WRITERS
        keys = key_block(number, count)
        for start in range(0, count, FRAME_ENTRIES):
            part = keys[start : start + FRAME_ENTRIES]
            entries = np.zeros(len(part), entry_dtype(KEY_BYTES))
            entries["key"] = part.view(f"V{KEY_BYTES}").ravel()
            entries["segment"] = 1 + (start + np.arange(len(part))) // SEGMENT_BLOCKS
            entries["offset"] = 4096 + 65536 * ((start + np.arange(len(part))) % SEGMENT_BLOCKS)
            entries["length"] = 65536
            log.append(Kind.ENTRIES, entries.tobytes(), len(part), key_bytes=KEY_BYTES)
        for segment in range(1, count // SEGMENT_BLOCKS + 2):
            header = encode_segment_header(segment, bytes.fromhex(writer), pool.pool_id)
            (directory / f"{segment:08d}.seg").write_bytes(header)
        log.close()


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(root: Path, blocks: int) -> dict[str, float]:
    """One run in this process."""
    before = resident_bytes()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    store = open_store(f"file://{root}?poll=1h")
    open_s, open_cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    assert store.stats().blocks == blocks // WRITERS * WRITERS
    bytes_per_block = (resident_bytes() - before) / blocks
    keys = [row.tobytes() for number in range(WRITERS) for row in key_block(number, blocks // WRITERS)]
    unknown = [row.tobytes() for row in key_block(999, len(keys) // 10)]
    mixed = keys + unknown
    random.Random(1).shuffle(mixed)
    start_s = time.perf_counter()
    found = sum(int(store.lookup(mixed[i : i + BATCH]).mask.sum()) for i in range(0, len(mixed), BATCH))
    batch_s = time.perf_counter() - start_s
    assert found == len(keys)
    single_us = []
    for key in mixed[:200_000]:
        start_ns = time.perf_counter_ns()
        store.lookup([key])
        single_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    contains_us = []
    for key in mixed[200_000:400_000]:
        start_ns = time.perf_counter_ns()
        key in store  # noqa: B015 - the look-up itself is what is timed
        contains_us.append((time.perf_counter_ns() - start_ns) / 1e3)
    store.close()
    return {
        "open_s": open_s,
        "open_cpu_s": open_cpu_s,
        "bytes_per_block": bytes_per_block,
        "batch_keys_per_s": len(mixed) / batch_s,
        "single_p50_us": float(np.percentile(single_us, 50)),
        "single_p99_us": float(np.percentile(single_us, 99)),
        "contains_p99_us": float(np.percentile(contains_us, 99)),
    }


def main() -> None:
    """Make the pool, measure five times in fresh processes, print medians and spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", metavar="POOL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure), arguments.blocks)))
        return
    root = Path(tempfile.mkdtemp(prefix="rewarm-index-", dir=arguments.directory))
    try:
        make_pool(root, arguments.blocks)
        command = [sys.executable, __file__, "--measure", str(root), "--blocks", str(arguments.blocks)]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(arguments.repeats)]
        for name in runs[0]:
            values = [run[name] for run in runs]
            print(f"{name:18} median {statistics.median(values):12,.3f}   {min(values):,.3f} .. {max(values):,.3f}")
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
