"""What every peer of the duel does: write blocks, drop its page cache, load requests, show the bytes.

A peer lives in a worker process of its own (`worker.py`) under the interpreter that has its packages. `load` runs
requests, each a list of block numbers in file order, all at once; what it measures itself (a child process that also
pre-faults memory, say) it returns, else the worker's clocks count.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

Requests = list[list[int]]


@dataclass
class Loaded:
    """One pass: seconds until each request was answered, and what the peer measured itself (None: it did not)."""

    latencies_s: list[float]
    seconds: float | None = None
    cpu_s: float | None = None


@dataclass
class Peer:
    """Base of the peers. `variants` are rows that share one set of files; `settings` names how each was set up."""

    directory: Path
    block: int
    count: int
    settings: dict[str, str] = field(default_factory=dict)
    busy_beside = False
    """True where the work is done by a child process, so that the busy thread is a process beside it."""

    def write(self, rows: np.ndarray) -> float:
        """Write blocks, shape (count, block); seconds until the peer says that they are stored, without a sync."""
        raise NotImplementedError

    def load(self, variant: str, requests: Requests) -> Loaded:
        """Run requests at once."""
        raise NotImplementedError

    def payload(self, block: int) -> object | None:
        """The bytes of a block of the last `load` (buffer protocol), None if it failed or cannot be shown."""
        raise NotImplementedError

    def poison(self) -> None:
        """Overwrite the destination, so that bytes of an earlier pass cannot pass for read ones."""

    def release(self) -> None:
        """Give back what the last `load` returned."""

    def close(self) -> None:
        """Stop threads and free memory."""


def arena(count: int, block: int) -> np.ndarray:
    """Pre-faulted page-aligned memory of huge pages where there are some, shape (count, block)."""
    memory = mmap.mmap(-1, count * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    made = np.frombuffer(memory, np.uint8)
    made[:] = 1
    return made.reshape(count, block)


def content(count: int, block: int) -> np.ndarray:
    """Incompressible bytes, distinct per block and the same in every process, shape (count, block)."""
    words = np.random.default_rng(block).integers(0, 2**64, count * block // 8, np.uint64)
    return words.view(np.uint8).reshape(count, block)


def sync_file_system(directory: Path) -> None:
    """Have everything written to this file system."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        ctypes.CDLL(None).syncfs(fd)
    finally:
        os.close(fd)


def drop_page_cache(directory: Path) -> None:
    """Forget what the page cache holds of the files below; they must be synced."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def in_threads(run: Callable[[list[int]], object], requests: Requests) -> tuple[list[object], list[float]]:
    """Run each request in a thread of its own (one: in this one); results and seconds until each was answered."""
    start_s = perf_counter()

    def timed(request: list[int]) -> tuple[object, float]:
        result = run(request)
        return result, perf_counter() - start_s

    if len(requests) == 1:
        answers: Sequence[tuple[object, float]] = [timed(requests[0])]
    else:
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(timed, requests))
    return [result for result, _ in answers], [seconds for _, seconds in answers]
