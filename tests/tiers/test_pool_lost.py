"""One drive of three is taken away while eight threads restore and save: its blocks miss, the rest go on."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.test_pool_drives import Drives

import rewarm
from rewarm.store.contract import Outcome, Store
from rewarm.store.devices.base import READ, WRITE
from rewarm.testing import make_keys
from rewarm.testing.faulty import Fault, failure, stall
from rewarm.testing.kit.base import assert_hits_are_right, blocks_of, destinations
from rewarm.tiers import lane as lanes
from rewarm.tiers.pool import PoolStore

BLOCK = 64 << 10
THREADS = 8
ROUNDS = 12
CONTEXT_BLOCKS = 48
DEADLINE_S = 20.0


def take_away_under_load(pool: PoolStore, lost: str, take_away: Callable[[], None]) -> None:
    """Load and save from many threads, take a drive away in the middle, and judge every outcome."""
    contexts = [make_keys(CONTEXT_BLOCKS, f"context {number}") for number in range(THREADS)]
    for keys in contexts:
        assert all(pool.save(keys, blocks_of(keys, BLOCK)).wait(DEADLINE_S))
    on_lost = next(lane.store for lane in pool._lanes if lane.name == lost)
    elsewhere = [~on_lost.lookup(keys).mask for keys in contexts]
    assert all(0 < mask.sum() < CONTEXT_BLOCKS for mask in elsewhere)
    half = threading.Barrier(THREADS + 1)

    def work(number: int) -> int:
        hits = 0
        for turn in range(ROUNDS):
            if turn == ROUNDS // 2:
                half.wait(DEADLINE_S)  # some are before it, some behind it, with loads of others under way
            buffers = destinations(CONTEXT_BLOCKS, BLOCK)
            transfer = pool.load(contexts[number], buffers)
            good = np.array(transfer.wait(DEADLINE_S))
            assert Outcome.TIMED_OUT not in transfer.outcomes, "no verdict in time"
            assert_hits_are_right(contexts[number], buffers, transfer.outcomes)
            assert good[elsewhere[number]].all(), "a block of a drive that works was missed"
            hits += int(good.sum())
            keys = make_keys(6, f"save {number} {turn}")
            assert all(pool.save(keys, blocks_of(keys, BLOCK)).wait(DEADLINE_S)), "no other drive took it"
        return hits

    with ThreadPoolExecutor(THREADS) as executor:
        running = [executor.submit(work, number) for number in range(THREADS)]
        half.wait(DEADLINE_S)
        take_away()
        total = sum(future.result(4 * DEADLINE_S) for future in running)
    assert total < THREADS * ROUNDS * CONTEXT_BLOCKS, "the drive was lost, and nothing was missed"
    assert any(note.startswith(f"{lost}: avoided") for note in pool.stats().notes)


@pytest.mark.crash
@pytest.mark.parametrize("fault", [failure(errno.ENODEV), stall()], ids=["fails", "hangs"])
def test_a_drive_is_taken_away_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    monkeypatch.setattr(lanes, "LOAD_STALL_S", 0.5)
    monkeypatch.setattr(lanes, "SAVE_STALL_S", 1.0)
    drives = Drives(tmp_path)
    with PoolStore([drives.open(name, "&close_timeout=1s&io_deadline=3s") for name in ("a", "b", "c")]) as pool:

        def take_away() -> None:
            drives.reads["b"].chance(fault, 1.0, opcode=READ)
            drives.writes["b"].chance(fault, 1.0, opcode=WRITE)

        take_away_under_load(pool, "b", take_away)
        for device in (drives.reads["b"], drives.writes["b"]):
            device.heal()
            device.release_stalled()


@contextlib.contextmanager
def xfs(root: Path, name: str) -> Iterator[Path]:
    """A small XFS file system on a loop device."""
    image, mount = root / f"{name}.img", root / name
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.lab
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("mkfs.xfs", "xfs_io", "mount"))),
    reason="needs root, mkfs.xfs and xfs_io, to shut a file system down as a dead drive does",
)
def test_a_file_system_is_shut_down_under_load(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        mounts = [stack.enter_context(xfs(tmp_path, name)) for name in ("a", "b", "c")]
        drives = "&".join(f"drive={mount}" for mount in mounts)
        store: Store = stack.enter_context(rewarm.open(f"pool:?{drives}&capacity=600MiB&close_timeout=2s"))
        assert isinstance(store, PoolStore)
        start = time.monotonic()
        shut_down = ["xfs_io", "-x", "-c", "shutdown", str(mounts[1])]
        take_away_under_load(store, str(mounts[1]), lambda: subprocess.run(shut_down, check=True) and None)
        assert time.monotonic() - start < 4 * DEADLINE_S
