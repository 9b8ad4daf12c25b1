"""Cold restore of one prefix against fio and a bare C ring: the same files, the same order, in one interleaved run.

    python benchmarks/cold_restore.py --bed /mnt/xfs-on-ram --bed /mnt/disk [--blocks 64KiB,1MiB] [--quick]
    python benchmarks/cold_restore.py --bed /mnt/disk --size 512MiB --repeats 5 --rows rewarm,process,ring

For each bed and block size: saves about 1 GiB (`--size`), then in each round reads it with fio (io_uring, direct,
iodepth 32), with the C ring (32 in flight, plain and registered buffers; built on the spot if a compiler and liburing
are there) and with `Store.load`, which also verifies every block, by its thread and by its I/O process (into shared
memory), and for comparison by the thread without its checksum. Then again beside a thread that computes in Python and
never waits; beside the C ring and fio, which are processes, it is a process. All memory is pre-faulted and asks for
huge pages; Rewarm's arenas are registered. The order changes from round to round. Prints medians, spread, CPU seconds
per GB (without the busy thread's), and the ratio of the paired rounds; the CPU of one pass of XXH3-128 over the same
memory stands beside what verification added. Bytes are compared with /proc/PID/io of whoever reads. `--rows` leaves out
rows that are not wanted, to keep a run short: rewarm, process, unverified, fio, ring.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from _busy import BusyProcess, BusyThread, Quiet
from _media import QUEUE, build_ring, extents_of, read_bytes, run_ring
from _unchecked import checksum_left_out
from rewarm.store.contract import Store
from rewarm.store.layout import digest
from rewarm.store.opening import open_store
from rewarm.store.process.arena import shared_arena
from rewarm.units import format_size, parse_size

BYTES = 1 << 30
SAVE_BYTES = 64 << 20
ROWS = {"rewarm", "process", "unverified", "fio", "ring"}


class Bed:
    """One pool of `size` bytes in blocks of one size on one directory."""

    def __init__(self, directory: Path, block: int, size: int, *, process: bool) -> None:
        self.block = block
        self.root = Path(tempfile.mkdtemp(prefix="rewarm-cold-", dir=directory))
        self.store = open_store(f"file://{self.root}?capacity=1TiB")
        self.count = size // block
        self.keys = [i.to_bytes(32, "big") for i in range(self.count)]
        step = max(SAVE_BYTES // block, 1)
        for start in range(0, self.count, step):
            batch = self.keys[start : start + step]
            content = np.frombuffer(os.urandom(len(batch) * block), np.uint8).reshape(len(batch), block)
            assert all(self.store.save(batch, content).wait())
        self.store.flush()
        memory = mmap.mmap(-1, self.count * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        arena = np.frombuffer(memory, np.uint8)
        arena[:] = 1
        self.arena = arena.reshape(self.count, block)
        self.registered = self.store.register(arena)
        self.extents = extents_of(self.root)
        self.beside = open_store(f"file://{self.root}?io=process") if process else None
        if self.beside:
            shared = np.frombuffer(shared_arena(self.count * block), np.uint8)
            shared[:] = 1
            self.shared = shared.reshape(self.count, block)
            self.beside.register(shared)
            found = re.search(r"process (\d+) reads", "".join(self.beside.stats().notes))
            assert found, self.beside.stats().notes
            self.pid = int(found[1])

    def rewarm(self) -> tuple[float, float, int]:
        """Seconds, CPU seconds, bytes of one verified restore."""
        return self._restore(self.store, self.arena, [os.getpid()])

    def process(self) -> tuple[float, float, int]:
        """The same by the I/O process, whose CPU counts too."""
        assert self.beside
        return self._restore(self.beside, self.shared, [os.getpid(), self.pid])

    def _restore(self, store: Store, arena: np.ndarray, pids: list[int]) -> tuple[float, float, int]:
        before = sum(map(read_bytes, pids))
        used_s, start_s = cpu_seconds(pids), time.perf_counter()
        good = store.load(self.keys, arena).wait()
        seconds, used_s = time.perf_counter() - start_s, cpu_seconds(pids) - used_s
        counted = sum(map(read_bytes, pids)) - before
        assert all(good)
        payload = self.count * self.block
        assert abs(counted - payload) < 0.01 * payload, f"not cold: the kernel counted {counted} of {payload}"
        return seconds, used_s, payload

    def rewarm_unverified(self) -> tuple[float, float, int]:
        """The same with the checksum left out, which no user can do: shows what verification costs."""
        with checksum_left_out():
            return self.rewarm()

    def checksums(self) -> tuple[float, float, int]:
        """One pass of XXH3-128 over the same memory, which is what verification has to do."""
        cpu_s, start_s = time.process_time(), time.perf_counter()
        for row in self.arena:
            digest(row)
        return time.perf_counter() - start_s, time.process_time() - cpu_s, self.count * self.block

    def ring(self, binary: Path, fixed: bool) -> tuple[float, float, int]:
        """The same through the C ring."""
        result = run_ring(binary, self.extents, self.block, fixed=fixed)
        return result["seconds"], result["cpu_s"], result["bytes"]

    def fio(self) -> tuple[float, float, int]:
        """The same through fio."""
        seconds = cpu_s = 0.0
        total = 0
        for path, size in self.extents:
            command = ["fio", "--name=r", f"--filename={path}", "--rw=read", f"--bs={self.block}", "--offset=4096"]
            command += [f"--size={size}", "--direct=1", "--ioengine=io_uring", f"--iodepth={QUEUE}"]
            command += ["--output-format=json", "--invalidate=0", "--readonly"]
            job = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
            elapsed = job["read"]["io_bytes"] / job["read"]["bw_bytes"]
            seconds += elapsed
            cpu_s += elapsed * (job["usr_cpu"] + job["sys_cpu"]) / 100
            total += job["read"]["io_bytes"]
        return seconds, cpu_s, total

    def close(self) -> None:
        """Remove the pool."""
        self.store.close()
        if self.beside:
            self.beside.close()
        shutil.rmtree(self.root)


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of processes: each has a clock, whose number is made of its own (see clock_getcpuclockid)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


Run = tuple[float, float, int]
BUSY = "busy: "


def beside(load: type[Quiet], method: Callable[[], Run]) -> Callable[[], Run]:
    """The method beside a load, whose CPU seconds are taken off."""

    def run() -> Run:
        busy = load()
        try:
            used_s = busy.cpu_s()
            seconds, cpu_s, size = method()
            return seconds, cpu_s - (busy.cpu_s() - used_s), size
        finally:
            busy.stop()

    return run


def methods_of(bed: Bed, ring: Path | None, rows: set[str]) -> dict[str, Callable[[], Run]]:
    """Everything that is measured, by name."""
    methods: dict[str, Callable[[], Run]] = {"rewarm": bed.rewarm}
    if "process" in rows:
        methods["rewarm, I/O process"] = bed.process
    if "unverified" in rows:
        methods["rewarm, unverified"] = bed.rewarm_unverified
    others: dict[str, Callable[[], Run]] = {"fio": bed.fio} if "fio" in rows else {}
    if ring and "ring" in rows:
        others |= {"c ring": lambda: bed.ring(ring, False), "c ring, registered": lambda: bed.ring(ring, True)}
    busy = {BUSY + name: beside(BusyThread, method) for name, method in methods.items()}
    busy |= {BUSY + name: beside(BusyProcess, method) for name, method in others.items()}
    alone = {"xxh3 alone": bed.checksums} if "unverified" in rows else {}
    return methods | alone | others | busy


def run_bed(directory: Path, block: int, size: int, ring: Path | None, repeats: int, rows: set[str]) -> None:
    """Measure and print one block size on one bed."""
    bed = Bed(directory, block, size, process="process" in rows)
    try:
        methods = methods_of(bed, ring, rows)
        runs: dict[str, list[Run]] = {name: [] for name in methods}
        for method in methods.values():
            method()
        for number in range(repeats):
            names = list(methods)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                runs[name].append(methods[name]())
        print(
            f"\n{directory}, {bed.store.stats().device}, blocks of {format_size(block)}, {format_size(size)}, "
            f"{repeats} interleaved rounds, load {os.getloadavg()[0]:.1f}"
        )
        for note in bed.beside.stats().notes if bed.beside else ():
            print(f"  {note}")
        show(runs)
    finally:
        bed.close()


def show(runs: dict[str, list[Run]]) -> None:
    """Print rates, CPU and ratios: of Rewarm by its thread, and by its I/O process, to each of the others."""
    rates = {name: [size / seconds / 1e9 for seconds, _, size in of] for name, of in runs.items()}
    cpu = {name: statistics.median(used_s / size * 1e9 for _, used_s, size in of) for name, of in runs.items()}
    for name, of in rates.items():
        load = BUSY if name.startswith(BUSY) else ""
        ours = [rates[load + one] for one in ("rewarm", "rewarm, I/O process") if load + one in rates]
        paired = [statistics.median(mine / theirs for mine, theirs in zip(one, of, strict=True)) for one in ours]
        print(
            f"  {name:24} {statistics.median(of):6.2f} GB/s ({min(of):.2f} .. {max(of):.2f})"
            f"  {cpu[name]:.4f} CPU s/GB   rewarm at {' / '.join(f'{ratio:.2f}' for ratio in paired)} of it"
        )
    if "xxh3 alone" in cpu:
        added = cpu["rewarm"] - cpu["rewarm, unverified"]
        print(f"  verification added {added:.4f} CPU s/GB; one pass alone costs {cpu['xxh3 alone']:.4f}", flush=True)


def main() -> None:
    """Run every bed and block size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bed", action="append", required=True, type=Path)
    parser.add_argument("--blocks", default="64KiB,256KiB,1MiB,8MiB,64MiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--size", type=parse_size, default=BYTES, help="bytes of the pool")
    parser.add_argument("--rows", type=lambda text: set(text.split(",")), default=ROWS, help="which, by commas")
    parser.add_argument("--quick", action="store_true", help="two rounds, 64 KiB and 1 MiB")
    arguments = parser.parse_args()
    blocks, repeats = ("64KiB,1MiB", 2) if arguments.quick else (arguments.blocks, arguments.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        ring = build_ring(Path(scratch))
        for directory in arguments.bed:
            for block in blocks.split(","):
                run_bed(directory, parse_size(block), arguments.size, ring, repeats, arguments.rows)


if __name__ == "__main__":
    main()
