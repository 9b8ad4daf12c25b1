"""Saving against fio: bandwidth of durable writes, and what `save` costs its caller.

    python benchmarks/store_save.py --bed /mnt/xfs-on-ram --bed /mnt/disk [--blocks 64KiB,1MiB] [--quick]
    python benchmarks/store_save.py --device /dev/loop7          the same on a raw pool: EVERYTHING ON IT IS LOST

In each round writes about 512 MiB with fio (io_uring, direct, iodepth 32, a fresh file that grows, synced at the end)
and with `Store.save` of batches of 64 MiB followed by `flush`, into a pool of its own; the order changes from round to
round. On a device fio writes what the next pool is then formatted over. Then the thread CPU time of one `save` call of
64 and of 1,000 blocks. Medians and spread.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from rewarm.store.contract import Store
from rewarm.store.opening import open_store
from rewarm.store.raw.formatting import format_device
from rewarm.units import format_size, parse_size

BYTES = 512 << 20
BATCH_BYTES = 64 << 20


def aligned(count: int) -> np.ndarray:
    """Random bytes that start on a page, as an engine's pinned memory does, shape (count,)."""
    array = np.frombuffer(mmap.mmap(-1, count), np.uint8)
    array[:] = np.frombuffer(os.urandom(count), np.uint8)
    return array


def save_once(bed: Path, block: int, content: np.ndarray) -> tuple[float, float]:
    """(bytes per second, CPU seconds per GB) of saving everything and flushing."""
    if not bed.is_dir():
        format_device(str(bed), force=True)
        with open_store(f"block://{bed}?role=owner&poll=100ms") as store:
            return _save_all(store, block, content)
    root = Path(tempfile.mkdtemp(prefix="rewarm-save-", dir=bed))
    store = open_store(f"file://{root}?capacity=1TiB")
    try:
        return _save_all(store, block, content)
    finally:
        store.close()
        shutil.rmtree(root)


def _save_all(store: Store, block: int, content: np.ndarray) -> tuple[float, float]:
    step = max(BATCH_BYTES // block, 1)
    count = BYTES // block
    cpu_s, start_s = time.process_time(), time.perf_counter()
    transfers = []
    for start in range(0, count, step):
        keys = [os.urandom(32) for _ in range(min(step, count - start))]
        transfers.append(store.save(keys, content[: len(keys)]))
    assert all(all(transfer.wait()) for transfer in transfers)
    store.flush()
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    return count * block / seconds, cpu_s / (count * block) * 1e9


def fio_once(bed: Path, block: int) -> tuple[float, float]:
    """The same with fio."""
    root = Path(tempfile.mkdtemp(prefix="rewarm-fio-", dir=bed if bed.is_dir() else None))
    where = f"--directory={root}" if bed.is_dir() else f"--filename={bed}"
    command = ["fio", "--name=w", where, "--rw=write", f"--bs={block}", f"--size={BYTES}", "--direct=1"]
    command += ["--ioengine=io_uring", "--iodepth=32", "--fallocate=none", "--create_on_open=1", "--end_fsync=1"]
    command += ["--output-format=json"]
    try:
        job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
        seconds = job["job_runtime"] / 1e3
        return BYTES / seconds, seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100 / BYTES * 1e9
    finally:
        shutil.rmtree(root)


def caller_cost(directory: Path, blocks: int) -> float:
    """Median thread CPU, milliseconds, of one `save` call of blocks of 64 KiB."""
    root = Path(tempfile.mkdtemp(prefix="rewarm-cost-", dir=directory))
    content = list(aligned(blocks * 65536).reshape(blocks, 65536))
    costs = []
    with open_store(f"file://{root}?capacity=1TiB") as store:
        for _ in range(7):
            keys = [os.urandom(32) for _ in range(blocks)]
            cpu_s = time.thread_time()
            transfer = store.save(keys, content)
            costs.append((time.thread_time() - cpu_s) * 1e3)
            transfer.wait()
    shutil.rmtree(root)
    return statistics.median(costs)


def main() -> None:
    """Run every bed and block size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", action="append", default=[], type=Path)
    parser.add_argument("--device", action="append", default=[], type=Path, help="everything on it is lost")
    parser.add_argument("--blocks", default="64KiB,256KiB,1MiB,8MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds, 64 KiB and 1 MiB")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.blocks, arguments.repeats = "64KiB,1MiB", 2
    for directory in [*arguments.bed, *arguments.device]:
        for text in arguments.blocks.split(","):
            block = parse_size(text)
            content = aligned(BATCH_BYTES).reshape(-1, block)
            ours, theirs = [], []
            for number in range(arguments.repeats):
                for turn in (0, 1):
                    if (number + turn) % 2:
                        ours.append(save_once(directory, block, content))
                    else:
                        theirs.append(fio_once(directory, block))
            ratio = statistics.median(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
            print(f"{directory} {format_size(block)}: rewarm at {ratio:.2f} of fio")
            for name, runs in (("rewarm", ours), ("fio", theirs)):
                rates = [rate / 1e9 for rate, _ in runs]
                cpu = statistics.median(cpu for _, cpu in runs)
                spread = f"{statistics.median(rates):.2f} GB/s ({min(rates):.2f} .. {max(rates):.2f})"
                print(f"  {name:8} {spread} {cpu:.3f} CPU s/GB")
        for blocks in (64, 1000) if directory.is_dir() else ():
            print(f"{directory}: one save call of {blocks} blocks costs {caller_cost(directory, blocks):.2f} ms of CPU")


if __name__ == "__main__":
    main()
