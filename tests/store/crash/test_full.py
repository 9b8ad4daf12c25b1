"""A full disk: saves are refused and counted, loads go on, and saves go on when there is room again."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewarm.errors import StorageError
from rewarm.store.contract import Outcome, Store
from rewarm.store.devices.base import WRITE, Device
from rewarm.store.opening import open_store
from rewarm.testing import FaultyDevice, make_keys, payload
from rewarm.testing.faulty import failure

pytestmark = pytest.mark.crash

DISK_BYTES = 400 << 20
"""Just above the least that mkfs.xfs makes."""

BLOCK_BYTES = 256 << 10
WAIT_S = 60.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An XFS of its own on a loop device."""
    if os.geteuid() != 0 or not shutil.which("mkfs.xfs"):
        pytest.skip("needs root and mkfs.xfs for a loop file system; the faulty device stands in for it below")
    image, mount = tmp_path / "disk.img", tmp_path / "disk"
    mount.mkdir()
    with open(image, "wb") as file:
        file.truncate(DISK_BYTES)
    subprocess.run(["mkfs.xfs", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=False).returncode:
        pytest.skip("this machine mounts no loop devices")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=True)


def _save(store: Store, keys: list[bytes]) -> list[Outcome | None]:
    transfer = store.save(keys, [payload(key, BLOCK_BYTES) for key in keys])
    transfer.wait(WAIT_S)
    return transfer.outcomes


def _load(store: Store, keys: list[bytes]) -> list[Outcome | None]:
    buffers = [bytearray(BLOCK_BYTES) for _ in keys]
    transfer = store.load(keys, buffers)
    transfer.wait(WAIT_S)
    for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
        assert outcome is not Outcome.HIT or buffer == payload(key, BLOCK_BYTES)
    return transfer.outcomes


def _fill(disk: Path) -> Path:
    """Take every byte that is left, as another user of the disk would."""
    ballast = disk / "ballast"
    size = 64 << 20
    with open(ballast, "ab", buffering=0) as file:
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
    return ballast


def test_a_pool_larger_than_its_disk_stops_where_the_disk_ends(small_disk: Path) -> None:
    pool = small_disk / "kv"
    pool.mkdir()
    with open_store(f"file://{pool}?capacity=4GiB", namespace="full") as store:
        keys = make_keys(4 * DISK_BYTES // BLOCK_BYTES // 2)
        pinned = keys[:16]
        assert _save(store, pinned) == [Outcome.STORED] * 16
        with store.pin(pinned):
            for start in range(16, len(keys), 16):
                batch = keys[start : start + 16]
                outcomes = _save(store, batch)
                assert set(outcomes) <= {Outcome.STORED, Outcome.REFUSED_FULL}
                stored = [key for key, outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.STORED]
                assert _load(store, stored) == [Outcome.HIT] * len(stored)
            assert _load(store, pinned) == [Outcome.HIT] * 16
        assert set(_load(store, keys)) <= {Outcome.HIT, Outcome.MISSING}
        assert shutil.disk_usage(small_disk).free > 0


def test_a_disk_filled_by_others_refuses_saves_and_serves_loads(small_disk: Path) -> None:
    pool = small_disk / "kv"
    pool.mkdir()
    kept, more = make_keys(32, "kept"), make_keys(64, "more")
    with open_store(f"file://{pool}?capacity=4GiB", namespace="full") as store:
        assert _save(store, kept) == [Outcome.STORED] * 32
        with store.pin(kept):
            ballast = _fill(small_disk)
            assert _save(store, more) == [Outcome.REFUSED_FULL] * 64
            assert store.stats().refused[Outcome.REFUSED_FULL] == 64
            assert _load(store, kept) == [Outcome.HIT] * 32
            assert not store.lookup(more).mask.any()
            ballast.unlink()
            assert _save(store, more) == [Outcome.STORED] * 64
            assert _load(store, [*kept, *more]) == [Outcome.HIT] * 96
        report = store.check()
        assert report.clean, report.findings


def test_opening_on_a_full_disk_is_a_clear_error(small_disk: Path) -> None:
    pool = small_disk / "kv"
    pool.mkdir()
    ballast = _fill(small_disk)
    while True:  # The last blocks of a file system go one file at a time.
        try:
            (small_disk / f"crumb {len(os.listdir(small_disk))}").write_bytes(bytes(4096))
        except OSError:
            break
    with pytest.raises(StorageError, match="space"):
        open_store(f"file://{pool}?capacity=4GiB", namespace="full")
    ballast.unlink()
    open_store(f"file://{pool}?capacity=4GiB", namespace="full").close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_writes_that_the_kernel_refuses_are_refused_saves(tmp_path: Path, error: int) -> None:
    devices: list[FaultyDevice] = []

    def wrap(device: Device) -> Device:
        devices.append(FaultyDevice(device))
        return devices[-1]

    kept, more = make_keys(16, "kept"), make_keys(48, "more")
    with open_store(
        f"file://{tmp_path}?capacity=1GiB", namespace="full", device_wrapper=wrap, write_device_wrapper=wrap
    ) as store:
        assert _save(store, kept) == [Outcome.STORED] * 16
        for device in devices:
            device.chance(failure(error), 1.0, opcode=WRITE)
        assert _save(store, more) == [Outcome.REFUSED_FULL] * 48
        assert store.stats().refused[Outcome.REFUSED_FULL] == 48
        assert _load(store, kept) == [Outcome.HIT] * 16
        assert not store.lookup(more).mask.any()
        for device in devices:
            device.heal()
        assert _save(store, more) == [Outcome.STORED] * 48
        assert _load(store, [*kept, *more]) == [Outcome.HIT] * 64
    with open_store(f"file://{tmp_path}", namespace="full") as store:
        assert _load(store, [*kept, *more]) == [Outcome.HIT] * 64
        report = store.check()
        assert report.clean, report.findings
