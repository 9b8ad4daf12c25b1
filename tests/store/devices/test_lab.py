"""The ladder on real file systems made for the occasion: needs root, loop devices and the tools to make them."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from rewarm.errors import StorageError
from rewarm.store.devices import medium
from rewarm.store.devices.base import OPERATION, WRITE
from rewarm.store.devices.select import LADDER, choose_device

pytestmark = pytest.mark.lab

Mount = Callable[..., Path]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def unmount(where: Path) -> None:
    """Unmount; a ring that was closed with operations in flight lets go of its files a moment later."""
    deadline = time.monotonic() + 30.0
    while subprocess.run(["umount", str(where)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{where} stays busy"
        os.sched_yield()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Make a file system of `size` bytes and mount it: mount("ext4", size, "data=journal")."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with ExitStack() as stack:

        def make(kind: str, size: int = 0, options: str = "defaults") -> Path:
            where = tmp_path / f"mount-{kind}"
            where.mkdir()
            source = kind
            if size:
                tool = f"mkfs.{kind}"
                if not shutil.which(tool):
                    pytest.skip(f"no {tool}")
                image = tmp_path / f"image-{kind}"
                with open(image, "wb") as file:
                    file.truncate(size)
                source = command("losetup", "--find", "--show", "--direct-io=on", str(image))
                stack.callback(command, "losetup", "--detach", source)
                command(tool, "-q", source)
            command("mount", "-t", kind, "-o", options, source, str(where))
            stack.callback(unmount, where)
            return where

        yield make


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory)) - {"lost+found"}


def fill(path: Path) -> None:
    """Write past the page cache until not a single block is left (ext4 keeps some from buffered writes)."""
    with open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT)) as file:
        block = mmap.mmap(-1, 4096)
        with contextlib.suppress(OSError):
            while file.write(block) == len(block):
                pass


@pytest.mark.parametrize(("kind", "size"), [("xfs", 320 << 20), ("ext4", 16 << 20)])
def test_local_file_systems_get_the_ring(mount: Mount, kind: str, size: int) -> None:
    directory = mount(kind, size)
    choice = choose_device(directory)
    assert (choice.name, choice.direct, choice.filesystem, choice.network) == ("uring", True, kind, False)
    for name in LADDER:
        assert choose_device(directory, prefer=name).direct
    assert names(directory) == set()


def test_journalled_data_has_no_direct_io(mount: Mount) -> None:
    choice = choose_device(mount("ext4", 16 << 20, "data=journal"))
    assert (choice.name, choice.direct) == ("threads", False)
    assert "O_DIRECT" in choice.refusals[0]


def test_a_file_system_that_refuses_o_direct_at_open(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = mount("ramfs")
    assert choose_device(directory).refusals[0] == "O_DIRECT: not used on ramfs, which is memory"
    monkeypatch.setattr(medium, "MEMORY_FILESYSTEMS", frozenset())  # so that it is tried
    choice = choose_device(directory)
    assert (choice.name, choice.direct) == ("threads", False)
    assert "O_DIRECT: EINVAL" in choice.refusals[0]
    assert names(directory) == set()


def test_a_full_disk_opens_and_is_read(mount: Mount) -> None:
    directory = mount("ext4", 8 << 20)
    fill(directory / "filler")
    choice = choose_device(directory, sample=directory / "filler")
    assert (choice.name, choice.direct) == ("uring", True)
    assert any("ENOSPC" in line for line in choice.refusals)


def test_a_read_only_mount(mount: Mount) -> None:
    directory = mount("ext4", 8 << 20)
    (directory / "sample").write_bytes(os.urandom(1 << 16))
    command("mount", "-o", "remount,ro", str(directory))
    with pytest.raises(StorageError, match="EROFS"):
        choose_device(directory)
    assert choose_device(directory, writable=False, sample=directory / "sample").name == "uring"


@pytest.mark.parametrize("name", ["uring", "threads"])
def test_close_while_the_medium_hangs(mount: Mount, name: str) -> None:
    """A frozen file system holds writes for as long as it likes. Linux AIO would hold the caller in `submit`."""
    directory = mount("ext4", 16 << 20)
    memory = np.ones(4096, np.uint8)
    operation = np.zeros(1, OPERATION)
    with open(directory / "file", "w+b") as file:
        operation[0] = (1, WRITE, file.fileno(), 0, memory.ctypes.data, 4096)
        device = LADDER[name](4)
        command("fsfreeze", "--freeze", str(directory))
        try:
            device.submit(operation)
            assert len(device.reap(1, 0.05)) == 0
            device.close()
        finally:
            command("fsfreeze", "--unfreeze", str(directory))
        if name == "threads":  # what was left behind ends by itself
            while (directory / "file").stat().st_size == 0:
                os.sched_yield()
