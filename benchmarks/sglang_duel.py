"""Rewarm and SGLang's own `file` backend below SGLang's real host pool: GB/s of reading and writing pages.

    .venv-sglang/bin/python benchmarks/sglang_duel.py [--rounds 5] [--bed DIR ...] [--page 64]

Runs in the environment of `make sglang-env`. Both backends are made by SGLang's factory and driven by its controller's
own functions (`_page_get_zero_copy` for Rewarm, `_generic_page_get` for `file`), in calls of 128 pages, over one
`MHATokenToKVPoolHost` of 16 layers, 8 heads of 128, bfloat16 (64 KiB a token). In every round each reads all of its
pages twice, in turn: *cold*, after its files were dropped from the page cache, and *hot*, right after that. Rewarm
reads past the page cache where the medium allows, so both of its reads come from the medium; `file` reads hot pages
from memory. Every byte is compared after each read. On a bed in memory (/dev/shm) nothing is cold. `file` copies with
torch; beside other work more of torch's threads than idle cores make it slower, up to tenfold, so the default is one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
POOL_BYTES = 256 << 20
LAYERS, HEADS, WIDTH = 16, 8, 128
CALL_PAGES = 128
NAMES = ("file", "rewarm")


def main() -> None:
    """Write once, then take turns reading; print medians, spread and the ratio paired within rounds."""
    parser = argparse.ArgumentParser(description="Rewarm beside SGLang's file backend.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--bed", type=Path, action="append", help="where both keep their files; default: a temporary folder"
    )
    parser.add_argument("--page", type=int, default=64, help="tokens of a page")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, with which `file` copies")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(arguments.threads)
    for bed in arguments.bed or [Path(tempfile.gettempdir())]:
        folder = Path(tempfile.mkdtemp(prefix="rewarm-sglang-", dir=bed))
        try:
            Duel(folder, arguments.page).run(bed, arguments.rounds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Duel:
    """One host pool and two backends over it, on one bed."""

    def __init__(self, folder: Path, page: int) -> None:
        import torch
        from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
        from tests.sglang.worker import mha

        self.folder = folder
        self.page = page
        self.pages = POOL_BYTES // (2 * LAYERS * HEADS * WIDTH * 2 * page)
        with host_memory_budget_scope(4 * POOL_BYTES):  # SGLang leaves 10 GiB to others
            self.pool = mha(
                "page_first_direct", self.pages, page, torch.bfloat16, layers=LAYERS, heads=HEADS, width=WIDTH
            )
        self.bytes = self.pool.kv_buffer.view(-1).view(torch.uint8)
        self.bytes.copy_(torch.randint(0, 256, self.bytes.shape, dtype=torch.uint8))
        self.right = self.bytes.clone()
        self.keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(self.pages)]
        self.indices = torch.arange(self.pages * page)
        for name in NAMES:
            (folder / name).mkdir()
        self.backends = {name: self.attach(name) for name in NAMES}

    def attach(self, name: str) -> Any:
        """A backend with its defaults, made by SGLang's factory."""
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
        from tests.sglang.worker import BACKEND, configuration

        if name == "file":
            extra: dict[str, Any] = {"file_storage_path": str(self.folder / name)}
        else:
            extra = {**BACKEND, "url": f"file://{self.folder / name}?capacity=2GiB"}
        backend = StorageBackendFactory.create_backend(
            "file" if name == "file" else "dynamic", configuration(extra), self.pool
        )
        backend.register_mem_pool_host(self.pool)
        return backend

    def run(self, bed: Path, rounds: int) -> None:
        """The whole duel on one bed."""
        written = {name: self.rate(lambda name=name: self.move(name, "set")) for name in NAMES}  # type: ignore[misc]
        read: dict[tuple[str, str], list[float]] = {}
        for _ in range(rounds):
            for name in NAMES:
                drop_pages(self.folder / name)
                for state in ("cold", "hot"):
                    self.bytes.zero_()
                    read.setdefault((name, state), []).append(self.rate(lambda name=name: self.move(name, "get")))  # type: ignore[misc]
                    assert self.bytes.equal(self.right), f"{name} returned other bytes"
        device = self.backends["rewarm"].stats().store.device
        size = self.bytes.numel() / self.pages / (1 << 20)
        print(f"{bed}: {self.pages} pages of {self.page} tokens, {size:.2f} MiB; Rewarm through {device}; GB/s")
        for state in ("cold", "hot"):
            ratios = [r / f for r, f in zip(read["rewarm", state], read["file", state], strict=True)]
            line = "  ".join(f"{name} {spread(read[name, state])}" for name in NAMES)
            print(f"  read {state:4}  {line}  rewarm / file {spread(ratios)}")
        print("  written once:  " + "  ".join(f"{name} {written[name]:.2f}" for name in NAMES))
        self.backends["rewarm"].close()

    def rate(self, work: Callable[[], None]) -> float:
        """GB/s of moving the whole pool."""
        start_s = time.monotonic()
        work()
        return self.bytes.numel() / (time.monotonic() - start_s) / 1e9

    def move(self, name: str, verb: str) -> None:
        """All pages, as SGLang's controller moves them."""
        from sglang.srt.managers.cache_controller import HiCacheController

        itself = SimpleNamespace(storage_backend=self.backends[name], storage_host_pool=self.pool, page_size=self.page)
        operation = SimpleNamespace(request_id="duel", is_terminated=lambda: False)
        style = "generic_page" if name == "file" else "page"
        for at in range(0, self.pages, CALL_PAGES):
            keys = self.keys[at : at + CALL_PAGES]
            indices = self.indices[at * self.page : (at + len(keys)) * self.page]
            if verb == "set":
                done = getattr(HiCacheController, f"_{style}_set" + ("" if name == "file" else "_zero_copy"))
                assert done(itself, keys, indices)
            else:
                done = getattr(HiCacheController, f"_{style}_get" + ("" if name == "file" else "_zero_copy"))
                assert done(itself, operation, keys, indices) == len(keys)


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


def drop_pages(folder: Path) -> None:
    """Write files out and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
