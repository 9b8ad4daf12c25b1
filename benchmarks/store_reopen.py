"""Reopening a pool that 200 killed writers left behind.

    python benchmarks/store_reopen.py [--directory DIR] [--writers 200] [--blocks 50] [--repeats 5]

Each writer is a process of its own that saves blocks of 64 KiB until it is killed with SIGKILL; then the pool is opened
in fresh processes. Prints the median time of `rewarm.open` until everything published is a hit, and its spread.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from rewarm.store.opening import open_store

MEASURE = """
import sys, time
from rewarm.store.opening import open_store
start = time.perf_counter()
store = open_store("file://" + sys.argv[1])
print(time.perf_counter() - start, store.stats().blocks)
store.close()
"""


def be_killed(root: Path, number: int, blocks: int, ready: int) -> None:
    """A writer: tells how many blocks are published, then goes on saving until it is killed."""
    store = open_store(f"file://{root}")
    content = np.frombuffer(os.urandom(65536), np.uint8)
    sent = 0
    while True:
        keys = [f"writer {number:06d} block {sent + i:09d}".encode() for i in range(10)]
        assert all(store.save(keys, [content] * len(keys)).wait())
        sent += len(keys)
        if sent == blocks:
            os.write(ready, b"!")


def make_pool(root: Path, writers: int, blocks: int) -> None:
    """Start and kill writers one after another."""
    open_store(f"file://{root}?capacity=1TiB").close()
    for number in range(writers):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            be_killed(root, number, blocks, send)
        os.close(send)
        os.read(receive, 1)
        os.close(receive)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main() -> None:
    """Make the pool, open it in fresh processes, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--writers", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rewarm-reopen-", dir=arguments.directory))
    try:
        # The pool is made in a child of its own: this process must stay free of a store's threads to fork from.
        maker = os.fork()
        if maker == 0:
            make_pool_forked(root, arguments.writers, arguments.blocks)
        os.waitpid(maker, 0)
        runs = []
        for _ in range(arguments.repeats):
            output = subprocess.check_output([sys.executable, "-c", MEASURE, str(root)], text=True).split()
            runs.append((float(output[0]), int(output[1])))
        assert all(blocks >= arguments.writers * arguments.blocks for _, blocks in runs)
        times = [seconds for seconds, _ in runs]
        print(
            f"{arguments.writers} killed writers, {runs[0][1]} blocks: opened in {statistics.median(times):.3f} s"
            f" ({min(times):.3f} .. {max(times):.3f})"
        )
    finally:
        shutil.rmtree(root)


def make_pool_forked(root: Path, writers: int, blocks: int) -> None:
    """`make_pool` as the whole life of a forked child."""
    code = 1
    try:
        make_pool(root, writers, blocks)
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
