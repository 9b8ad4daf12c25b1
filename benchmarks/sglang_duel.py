"""Rewarm and SGLang's own `file` backend below SGLang's real host pool: cold reads, GB/s and CPU seconds per GB.

    python benchmarks/sglang_duel.py --bed /mnt/xfs-on-ram --bed /mnt/disk [--rounds 5] [--pages 64KiB,1MiB,4MiB]

Runs in the environment of `make sglang-env`. Both backends are made by SGLang's factory and driven by its controller's
own functions (`_page_get_zero_copy` for Rewarm, `_generic_page_get` for `file`), in calls of 128 pages, over one
`MHATokenToKVPoolHost` of 16 layers, 8 heads of 128, bfloat16 (64 KiB a token: Qwen3-32B on four ranks) with 256 MiB.
Every reading is a process of its own: its pool and its backend are made, then all pages are read twice, each time after
the files were dropped from the page cache: *first*, as after a restart, and *then*, as a process that has read before.
All bytes are compared, and the kernel must have counted them as read from the medium; in memory (/dev/shm) nothing is
cold, and the table says so. The contenders take turns, and the C ring (benchmarks/bare_ring.c, 1 MiB, 32 in flight,
registered memory, no checksum) reads the same segments in the same rounds: what the medium gives on this machine, so
its lead over `file` is what any reader could reach. The host pool is mapped as SGLang maps it; `--huge-pages` sets what
has SGLang ask for huge pages, for all contenders.

`file` reads a page into new memory of its own and copies it into the pool. Where that memory comes from decides half of
its speed, so it is measured twice: `file` with an allocator that keeps what is freed, as torch does for the pinned
memory of a machine with a GPU, and `file, new memory` with one that gets it from the kernel each time, as a process
without a GPU mostly does. It copies with torch; beside other work more of torch's threads than idle cores make it
slower, up to tenfold, so the default is the one thread that SGLang sets.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _child import in_child
from _media import build_ring, drop_pages, extents_of, read_bytes, run_ring
from rewarm.units import format_size, parse_size

ROOT = Path(__file__).resolve().parents[1]
POOL_BYTES = 256 << 20
LAYERS, HEADS, WIDTH = 16, 8, 128
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 2
CALL_PAGES = 128
RING_BLOCK = 1 << 20
HUGE_PAGES = "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS"
"""With any number of threads SGLang maps host pools of its own so that the kernel may use huge pages."""
OURS, FILE, FILE_NEW = "rewarm", "file", "file, new memory"
NAMES = (FILE, OURS, FILE_NEW)
STATES = ("first", "then")
Reading = dict[str, float]


def main() -> None:
    """Run every bed and page size."""
    parser = argparse.ArgumentParser(description="Rewarm beside SGLang's file backend.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--bed", type=Path, action="append", help="where both keep their files; default: a temporary folder"
    )
    parser.add_argument(
        "--pages", default="64KiB,256KiB,1MiB,2MiB,4MiB", help="bytes of a page, whole tokens of 64 KiB"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, with which `file` copies")
    parser.add_argument("--huge-pages", action="store_true", help=f"a host pool of huge pages, by {HUGE_PAGES}")
    parser.add_argument("-o", "--output", type=Path, help="also write every reading as JSON")
    arguments = parser.parse_args()
    enter_environment()
    os.environ[HUGE_PAGES] = "2" if arguments.huge_pages else "0"
    sizes = [int(parse_size(size)) for size in arguments.pages.split(",")]
    if wrong := [size for size in sizes if size % TOKEN_BYTES or POOL_BYTES % size]:
        sys.exit(f"pages of {wrong[0]} bytes do not fit: whole tokens of {TOKEN_BYTES}, and the pool has {POOL_BYTES}")
    prepare(arguments.threads)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        ring = build_ring(Path(scratch))
        for bed in arguments.bed or [Path(tempfile.gettempdir())]:
            for size in sizes:
                folder = Path(tempfile.mkdtemp(prefix="rewarm-sglang-", dir=bed))
                try:
                    results.append(duel(folder, bed, size, ring, arguments.rounds))
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


def enter_environment() -> None:
    """Go on in SGLang's environment where this one has no SGLang."""
    python = ROOT / ".venv-sglang" / "bin" / "python"
    if importlib.util.find_spec("sglang") is None:
        if not python.exists():
            sys.exit("SGLang is not installed here; run `make sglang-env`")
        os.execv(python, [str(python), *sys.argv])


def prepare(threads: int) -> None:
    """Import what all processes need, once."""
    sys.path.insert(0, str(ROOT))
    logging.disable(logging.WARNING)
    import torch
    from sglang.srt.managers import cache_controller  # noqa: F401
    from tests.sglang import worker  # noqa: F401

    torch.set_num_threads(threads)


def duel(folder: Path, bed: Path, page_bytes: int, ring: Path | None, rounds: int) -> dict[str, Any]:
    """Write once, then take turns reading; print medians, spread and ratios paired within rounds."""
    import torch

    content = torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8)
    for name in (FILE, OURS):
        (folder / name).mkdir()
        in_child(folder, lambda name=name: Side(folder, name, page_bytes).write(content))  # type: ignore[misc]
    readings: dict[str, list[list[Reading]]] = {name: [] for name in NAMES}
    medium: list[float] = []
    for number in range(rounds):
        for name in NAMES[number % len(NAMES) :] + NAMES[: number % len(NAMES)]:
            work = lambda name=name: Side(folder, name, page_bytes).read(content)  # type: ignore[misc] # noqa: E731
            readings[name].append(in_child(folder, work))
        extents = extents_of(folder / OURS)
        if ring and readings[OURS][-1][0]["kernel"]:
            found = run_ring(ring, extents, RING_BLOCK, fixed=True)
            medium.append(found["bytes"] / found["seconds"] / 1e9)
    show(bed, page_bytes, readings, medium)
    return {"bed": str(bed), "page_bytes": page_bytes, "readings": readings, "ring": medium, "load": os.getloadavg()}


class Side:
    """One contender in a process of its own: a host pool and a backend over it."""

    def __init__(self, folder: Path, name: str, page_bytes: int) -> None:
        import torch
        from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
        from tests.sglang.worker import mha

        self.name = name
        self.page = page_bytes // TOKEN_BYTES
        self.pages = POOL_BYTES // page_bytes
        self.files = folder / (OURS if name == OURS else FILE)
        if name != OURS:
            set_allocator(keep=name == FILE)
        with host_memory_budget_scope(4 * POOL_BYTES):  # SGLang leaves 10 GiB to others
            self.pool = mha(
                "page_first_direct", self.pages, self.page, torch.bfloat16, layers=LAYERS, heads=HEADS, width=WIDTH
            )
        self.bytes = self.pool.kv_buffer.view(-1).view(torch.uint8)
        self.keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(self.pages)]
        self.indices = torch.arange(self.pages * self.page)
        start_s = time.monotonic()
        self.backend = self.attach()
        self.opened_s = time.monotonic() - start_s

    def attach(self) -> Any:
        """A backend with its defaults, made by SGLang's factory."""
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
        from tests.sglang.worker import BACKEND, configuration

        if self.name == OURS:
            kind, extra = "dynamic", {**BACKEND, "url": f"file://{self.files}?capacity=2GiB"}
        else:
            kind, extra = "file", {"file_storage_path": str(self.files)}
        backend = StorageBackendFactory.create_backend(kind, configuration(extra), self.pool)
        backend.register_mem_pool_host(self.pool)
        return backend

    def write(self, content: Any) -> Reading:
        """Keep all pages."""
        self.bytes.copy_(content)
        start_s = time.monotonic()
        self.move("set")
        seconds = time.monotonic() - start_s
        if self.name == OURS:
            self.backend.close()
        return {"seconds": seconds}

    def read(self, content: Any) -> list[Reading]:
        """All pages twice, cold; every byte compared."""
        return [self.read_once(content) for _ in STATES]

    def read_once(self, content: Any) -> Reading:
        """One cold read of all pages."""
        self.bytes.zero_()
        drop_pages(self.files)
        kernel, cpu_s, start_s = read_bytes(), time.process_time(), time.perf_counter()
        self.move("get")
        seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        kernel = read_bytes() - kernel
        assert self.bytes.equal(content), f"{self.name} returned other bytes"
        assert not kernel or kernel > 0.99 * POOL_BYTES, f"{self.name}: not cold, the kernel counted {kernel} bytes"
        return {"seconds": seconds, "cpu_s": cpu_s, "kernel": kernel, "opened_s": self.opened_s}

    def move(self, verb: str) -> None:
        """All pages, as SGLang's controller moves them."""
        from sglang.srt.managers.cache_controller import HiCacheController

        itself = SimpleNamespace(storage_backend=self.backend, storage_host_pool=self.pool, page_size=self.page)
        operation = SimpleNamespace(request_id="duel", is_terminated=lambda: False)
        function = f"_page_{verb}_zero_copy" if self.name == OURS else f"_generic_page_{verb}"
        work: Callable[..., Any] = getattr(HiCacheController, function)
        for at in range(0, self.pages, CALL_PAGES):
            keys = self.keys[at : at + CALL_PAGES]
            indices = self.indices[at * self.page : (at + len(keys)) * self.page]
            if verb == "set":
                assert work(itself, keys, indices)
            else:
                assert work(itself, operation, keys, indices) == len(keys)


def set_allocator(*, keep: bool) -> None:
    """Have the C library keep the memory of freed pages, or give it back to the kernel at once."""
    trim, mapped = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    wanted = {mapped: 32 << 20, trim: 1 << 30} if keep else {mapped: 32 << 10, trim: 0}
    if not all(mallopt(name, value) for name, value in wanted.items()):
        sys.exit("this C library does not let its allocator be set")


def show(bed: Path, page_bytes: int, readings: dict[str, list[list[Reading]]], medium: list[float]) -> None:
    """Medians and ranges."""
    cold = "cold" if readings[OURS][0][0]["kernel"] else "in memory: nothing is cold"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{bed}: pages of {format_size(page_bytes)}, {len(readings[OURS])} interleaved rounds, {cold}; load {load}")
    for at, state in enumerate(STATES):
        rates = {name: [POOL_BYTES / turn[at]["seconds"] / 1e9 for turn in of] for name, of in readings.items()}
        for name in NAMES:
            cpu = statistics.median(turn[at]["cpu_s"] / POOL_BYTES * 1e9 for turn in readings[name])
            ratio = [ours / theirs for ours, theirs in zip(rates[OURS], rates[name], strict=True)]
            against = "" if name == OURS else f"   rewarm / this {spread(ratio)}"
            print(f"  {state:5}  {name:16}  {spread(rates[name])} GB/s  {cpu:.3f} CPU s/GB{against}")
            if medium and name == FILE:
                bound = [most / theirs for most, theirs in zip(medium, rates[name], strict=True)]
                print(f"  {state:5}  {'the C ring':16}  {spread(medium)} GB/s{'':19}   the ring / file {spread(bound)}")
    opened = statistics.median(turn[0]["opened_s"] for turn in readings[OURS])
    print(f"  Rewarm opens the pool and registers its memory in {opened:.2f} s", flush=True)


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


if __name__ == "__main__":
    main()
