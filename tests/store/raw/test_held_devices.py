"""`format` refuses a block device that is in use, whatever it is told, and changes nothing on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.raw.devices import loop_over

from rewarm.errors import PoolInUse
from rewarm.store.raw.formatting import format_device

pytestmark = pytest.mark.crash
SIZE = 80 << 20
COMMAND_S = 60


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "backing"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return path


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)


def rewarm_format(device: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return command(sys.executable, "-m", "rewarm", "format", f"block://{device}", *options)


def test_a_held_device_is_refused(backing: Path) -> None:
    with loop_over(backing) as device:
        holder = os.open(device, os.O_RDWR | os.O_EXCL)
        try:
            with pytest.raises(PoolInUse, match="held"):
                format_device(str(device), force=True)
        finally:
            os.close(holder)


@pytest.mark.parametrize("options", [(), ("--force",)], ids=["plain", "forced"])
def test_a_mounted_device_is_refused(backing: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    place = tmp_path / "place"
    place.mkdir()
    with loop_over(backing) as device:
        assert command("mkfs.ext4", "-q", str(device)).returncode == 0
        mounted = command("mount", str(device), str(place))
        if mounted.returncode:
            pytest.skip(f"this user may not mount: {mounted.stderr.strip()}")
        try:
            (place / "file").write_text("still here")
            refused = rewarm_format(device, *options)
        finally:
            assert command("umount", str(place)).returncode == 0
        assert refused.returncode
        assert "is mounted" in refused.stderr, refused
        assert command("mount", str(device), str(place)).returncode == 0
        try:
            assert (place / "file").read_text() == "still here"
        finally:
            assert command("umount", str(place)).returncode == 0
        assert command("e2fsck", "-fn", str(device)).returncode == 0
