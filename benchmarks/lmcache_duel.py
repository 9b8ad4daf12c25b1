"""Cold reads through LMCache's own adapter interface: Rewarm's plug-in beside LMCache's fs, fs_native and raw_block.

    .venv-lmcache/bin/python benchmarks/lmcache_duel.py [--rounds 5] [--directory DIR] [--sizes 256KiB,8MiB] [-o FILE]

Runs in LMCache's environment (make lmcache-env). Every adapter is made by LMCache from the configuration that a server
would be given, and driven as its controllers do: one task for all objects of one long request, an eventfd, a bitmap.
All of them read into the same memory, are filled first, and then read in turn (a b c d, d a b c, ..), each time after
the page cache was dropped. Every object has random content of its own; after each read all bytes are compared. A read
of which the kernel counts less than 99 % as read from the medium is not cold, and ends the benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import select
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewarm.units import format_size, parse_size

ROOT = Path(__file__).resolve().parents[1]
TOTAL_BYTES = 128 << 20
TIMEOUT_S = 60
PAGE = 4096
WORKERS = 8
TARGETS = ("rewarm", "raw_block io_uring", "fs_native direct", "fs direct", "fs")
os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")


def main() -> None:
    """Run every size, print one table."""
    parser = argparse.ArgumentParser(description="Cold reads through LMCache's adapters, Rewarm's among them.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where all adapters keep their files; default: a temporary one")
    parser.add_argument("--sizes", default="256KiB,8MiB", help="sizes of one object")
    parser.add_argument("-o", "--output", type=Path, help="also write every reading as JSON")
    arguments = parser.parse_args()
    python = ROOT / ".venv-lmcache" / "bin" / "python"
    if importlib.util.find_spec("lmcache") is None:
        if not python.exists():
            sys.exit("LMCache is not installed here; run `make lmcache-env`")
        os.execv(python, [str(python), *sys.argv])
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="lmcache-duel-") as folder:
        rows = [
            row
            for size in arguments.sizes.split(",")
            for row in duel(Path(folder), int(parse_size(size)), arguments.rounds)
        ]
    print_table(rows, arguments.rounds)
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def duel(folder: Path, object_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Fill every adapter with objects of one size, then read them in turn."""
    arena = Arena(object_bytes, TOTAL_BYTES // object_bytes)
    readings: dict[str, list[dict[str, float]]] = {name: [] for name in TARGETS}
    with contextlib.ExitStack() as stack:
        adapters = {}
        for name in TARGETS:
            place = folder / f"{name.replace(' ', '-')}-{object_bytes}"
            place.mkdir()
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            adapters[name] = stack.enter_context(opened(configuration(name, place, arena), arena))
            arena.bytes[:] = arena.expected
            store(adapters[name], arena)
        os.sync()  # only clean pages can be dropped
        order = list(TARGETS)
        for _ in range(rounds):
            for name in order:
                readings[name].append(read_cold(name, adapters[name], arena))
            order = order[-1:] + order[:-1]
    return [{"target": name, "object_bytes": object_bytes, "readings": readings[name]} for name in TARGETS]


class Arena:
    """LMCache's first level: one aligned piece of memory, and objects of one size in it."""

    def __init__(self, object_bytes: int, count: int) -> None:
        memory, data = (
            importlib.import_module(name)
            for name in ("lmcache.v1.memory_management", "lmcache.cli.commands.bench.l2_adapter_bench.data")
        )
        torch = importlib.import_module("torch")
        self.object_bytes, self.count = object_bytes, count
        self.tensor = data.make_aligned_tensor(object_bytes * count, PAGE)
        self.bytes = self.tensor.numpy().reshape(count, object_bytes)
        describe = importlib.import_module("lmcache.v1.distributed.internal_api").L1MemoryDesc
        total = object_bytes * count  # given twice, as a server does, so that adapters register the memory
        self.description = describe(self.tensor.data_ptr(), total, PAGE, stable_registration_size=total)
        key = importlib.import_module("lmcache.v1.distributed.api").ObjectKey
        self.keys = [key(i.to_bytes(32, "big"), "model", 0x01000100) for i in range(count)]
        self.objects = [
            memory.TensorMemoryObj(
                self.tensor[i * object_bytes : (i + 1) * object_bytes],
                memory.MemoryObjMetadata(
                    shape=torch.Size([object_bytes]),
                    dtype=torch.uint8,
                    address=i * object_bytes,
                    phy_size=object_bytes,
                    fmt=memory.MemoryFormat.KV_2LTD,
                    ref_count=1,
                ),
                parent_allocator=None,
            )
            for i in range(count)
        ]
        dice = [np.random.default_rng(i) for i in range(count)]
        self.expected = np.stack([die.integers(0, 256, object_bytes, np.uint8) for die in dice])


def configuration(name: str, place: Path, arena: Arena) -> dict[str, Any]:
    """The value of `--l2-adapter` for one target."""
    if name == "rewarm":
        params = {"url": f"file://{place}?capacity=1GiB", "namespace": "duel"}
        return {
            "type": "plugin",
            "module_path": "rewarm.connectors.lmcache",
            "class_name": "RewarmL2Adapter",
            "adapter_params": params,
        }
    if name.startswith("raw_block"):
        slot_bytes, meta_bytes, device = arena.object_bytes + PAGE, 64 << 20, place / "raw"
        with device.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, meta_bytes + slot_bytes * (arena.count + 4))
        return {
            "type": "raw_block",
            "device_path": str(device),
            "slot_bytes": slot_bytes,
            "block_align": PAGE,
            "header_bytes": PAGE,
            "meta_total_bytes": meta_bytes,
            "use_odirect": True,
            "io_engine": "io_uring",
            "iouring_queue_depth": 256,
            "enable_zero_copy": True,
            "load_checkpoint_on_init": False,
            "num_store_workers": WORKERS,
            "num_lookup_workers": 1,
            "num_load_workers": WORKERS,
        }
    kind, *direct = name.split()
    workers = {"num_workers": WORKERS} if kind == "fs_native" else {}
    return {"type": kind, "base_path": str(place), **workers, **({"use_odirect": True} if direct else {})}


@contextlib.contextmanager
def opened(spec: dict[str, Any], arena: Arena) -> Iterator[Any]:
    """An adapter, made by LMCache."""
    config = importlib.import_module("lmcache.v1.distributed.l2_adapters.config")
    make = importlib.import_module("lmcache.v1.distributed.l2_adapters").create_l2_adapter
    parsed = config.parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
    adapter = make(parsed.adapters[0], l1_memory_desc=arena.description)
    try:
        yield adapter
    finally:
        adapter.close()


def wait(descriptor: int) -> None:
    """Until an eventfd of an adapter is readable; takes its value."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(TIMEOUT_S * 1000):
        sys.exit("an adapter did not answer in time")
    importlib.import_module("lmcache.v1.platform").consume_fd(descriptor)


def store(adapter: Any, arena: Arena) -> None:
    """Store every object, some at a time: fs_native takes all of a task at once."""
    for at in range(0, arena.count, 64):
        task = adapter.submit_store_task(arena.keys[at : at + 64], arena.objects[at : at + 64])
        results: dict[int, Any] = {}
        while task not in results:
            wait(adapter.get_store_event_fd())
            results.update(adapter.pop_completed_store_tasks())
        if not results[task].is_successful():
            sys.exit(f"{type(adapter).__name__} did not store everything")


def read_cold(name: str, adapter: Any, arena: Arena) -> dict[str, float]:
    """One task for everything: seconds, CPU seconds of the process, bytes that the kernel counts. Checks all bytes."""
    arena.bytes[:] = 0
    drop_page_cache()
    kernel, cpu_s, start_s = kernel_bytes(), time.process_time(), time.perf_counter()
    task, bitmap = adapter.submit_load_task(arena.keys, arena.objects), None
    while bitmap is None:
        wait(adapter.get_load_event_fd())
        bitmap = adapter.query_load_result(task)
    seconds, cpu_s, kernel = time.perf_counter() - start_s, time.process_time() - cpu_s, kernel_bytes() - kernel
    if bitmap.popcount() != arena.count or not np.array_equal(arena.bytes, arena.expected):
        sys.exit(f"{name}: {arena.count - bitmap.popcount()} objects are missing, or bytes are wrong")
    if kernel < 0.99 * arena.bytes.nbytes:
        sys.exit(f"{name}: only {kernel} of {arena.bytes.nbytes} bytes came from the medium: not cold")
    return {"seconds": seconds, "cpu_s": cpu_s, "kernel_bytes": kernel}


def drop_page_cache() -> None:
    """Empty the page cache of everything that is on the medium."""
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError as error:
        sys.exit(f"cannot drop the page cache, which reads through it need to be cold: {error}")


def kernel_bytes() -> int:
    """Bytes that this process has caused to be read from media."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def print_table(rows: Sequence[dict[str, Any]], rounds: int) -> None:
    """Medians, and the slowest and fastest round."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("lmcache", "rewarm")]
    print(f"{', '.join(versions)}; {rounds} interleaved rounds, page cache dropped, {format_size(TOTAL_BYTES)} each\n")
    print("| object | adapter | GB/s, median | slowest to fastest | CPU s/GB |")
    print("|---|---|---|---|---|")
    for row in rows:
        rates = sorted(TOTAL_BYTES / 1e9 / reading["seconds"] for reading in row["readings"])
        cpu = statistics.median(reading["cpu_s"] for reading in row["readings"]) / (TOTAL_BYTES / 1e9)
        size = format_size(row["object_bytes"])
        spread = f"{rates[0]:.2f} to {rates[-1]:.2f}"
        print(f"| {size} | {row['target']} | {statistics.median(rates):.2f} | {spread} | {cpu:.3f} |")


if __name__ == "__main__":
    main()
