"""What the benchmarks of reading have in common: dropping the page cache, the kernel's counters, the bare C ring."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rewarm.store.layout import PAGE

HERE = Path(__file__).parent
QUEUE = 32
"""Requests that the C ring keeps in flight."""


def drop_pages(folder: Path) -> None:
    """Write the files of a folder out, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def read_bytes(pid: int | None = None) -> int:
    """Bytes that a process (this one) has caused to be read from media, by the kernel's count."""
    lines = Path(f"/proc/{pid or 'self'}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def build_ring(directory: Path) -> Path | None:
    """The C ring, or None where it cannot be built."""
    binary = directory / "bare_ring"
    command = ["cc", "-O2", str(HERE / "bare_ring.c"), "-o", str(binary), "-luring"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no C ring: {error}", file=sys.stderr)
        return None
    return binary


def extents_of(pool: Path) -> list[tuple[Path, int]]:
    """(segment, payload bytes) of a pool whose blocks are whole pages, and so leave no gaps."""
    segments = sorted(pool.glob("writers/*/*.seg"))
    return [(path, path.stat().st_size - PAGE) for path in segments]


def run_ring(binary: Path, extents: list[tuple[Path, int]], block: int, *, fixed: bool) -> dict[str, Any]:
    """One read of these extents in pieces of `block` bytes: seconds, cpu_s, bytes."""
    lines = "\n".join(f"{path} {PAGE} {size}" for path, size in extents)
    command = [str(binary), str(QUEUE), str(int(fixed)), str(block)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, input=lines, text=True, check=True, capture_output=True).stdout
    )
    return found
