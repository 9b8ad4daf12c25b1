"""Raw pools for tests on fixed files and loop devices: small, formatted for a host, opened as that host or another."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from rewarm.store.opening import open_store
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.header import LOG_OFFSET, plan_header
from rewarm.store.raw.store import RawStore

WAITS = "poll=20ms&lease=6s"
"""An owner must not be late on a busy machine: it stops saving half a lease after it last counted."""

SHORT_WAITS = "poll=20ms&lease=2s"
"""Where a test waits for the end of a lease."""


def make_file(path: Path, capacity_bytes: int, host: str = "") -> Path:
    """A formatted fixed file whose 32 slots hold `capacity_bytes`."""
    slot = capacity_bytes // 32
    size = LOG_OFFSET + capacity_bytes + (capacity_bytes >> 3)
    while plan_header(size, bytes(16), "", slot_bytes=slot).capacity_bytes > capacity_bytes:
        size -= slot
    with path.open("wb") as file:
        file.truncate(size)
    format_device(str(path), slot_bytes=slot, host=host)
    return path


def open_as(path: Path, host: str, options: str = "", namespace: object = "raw", waits: str = WAITS) -> RawStore:
    """Open a raw pool as a host of that name."""
    url = f"block://{path}?host={host}&{waits}{options}"
    return cast(RawStore, open_store(url, namespace=namespace))


@contextlib.contextmanager
def loop_over(backing: Path) -> Iterator[Path]:
    """A loop device over a file, detached at the end; skips where this user may not make one."""
    if shutil.which("losetup") is None or os.geteuid():
        pytest.skip("loop devices need losetup and root")
    made = subprocess.run(
        ["losetup", "--show", "--find", str(backing)], capture_output=True, text=True, timeout=30, check=False
    )
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], timeout=30, check=True)
