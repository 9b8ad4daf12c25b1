"""A real file system whose disk loses power: the image of a loop device, copied at one instant while a store writes.

The image lies on an outer XFS and is copied by sharing its extents, which the kernel does as one step: the copy is what
the disk held at that moment, without anything that the inner file system still had in memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.lengths import repeated
from tests.store.powerloss.lives import WAIT_S, block, size_of

from rewarm.store.contract import Outcome
from rewarm.store.opening import open_store
from rewarm.testing import make_keys

pytestmark = pytest.mark.crash

NAMESPACE = "power"
OUTER_BYTES, INNER_BYTES = 1 << 30, 330 << 20
LOSSES = repeated(6, 12)
ROOT = Path(__file__).resolve().parents[3]

WRITER = """
import sys
from tests.store.powerloss.lives import block
from tests.store.powerloss.test_image import NAMESPACE, keys_of
from rewarm.store.opening import open_store
store = open_store(f"file://{sys.argv[1]}?capacity=128MiB", namespace=NAMESPACE)
for batch in range(100_000):
    keys = keys_of(batch)
    assert all(store.save(keys, [block(key) for key in keys]).wait(60))
    if batch % 3 == 0:
        store.flush()
        print(batch, flush=True)
"""


def keys_of(batch: int) -> list[bytes]:
    """Keys of one batch."""
    return make_keys(12, f"image {batch}")


def _command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


class Disk:
    """An inner XFS whose image can be copied while it is in use."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        outer = self._image(folder / "outer.img", OUTER_BYTES)
        self._home = self.mount(outer, "outer")
        self.image = self._image(self._home / "disk.img", INNER_BYTES)
        self.root = self.mount(self.image, "inner")

    def _image(self, path: Path, size: int) -> Path:
        with open(path, "wb") as file:
            file.truncate(size)
        _command("mkfs.xfs", "-q", "-m", "reflink=1", "-s", "size=4096", str(path))
        return path

    def mount(self, image: Path, name: str) -> Path:
        """Mount an image on a loop device that writes past the page cache."""
        where = self._folder / name
        where.mkdir()
        loop = _command("losetup", "--find", "--show", "--direct-io=on", str(image))
        self._stack.callback(subprocess.run, ["losetup", "--detach", loop], check=False)
        _command("mount", "-o", "nouuid", loop, str(where))
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(where)], check=False)
        return where

    def lose_power(self, number: int) -> Path:
        """The image as it is now, under another name."""
        copy = self._home / f"copy-{number}.img"
        _command("cp", "--reflink=always", str(self.image), str(copy))
        return copy


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0 or not shutil.which("mkfs.xfs"):
        pytest.skip("needs root and mkfs.xfs for a loop file system; the simulated power losses stand in for it")
    with ExitStack() as stack:
        try:
            made = Disk(tmp_path, stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine mounts no loop devices: {error.stderr}")
        yield made


def _check_copy(root: Path, flushed: int) -> int:
    """Everything before the last flush that was told must be there; returns the hits."""
    with open_store(f"file://{root}", namespace=NAMESPACE) as store:
        hits = 0
        for batch in range(flushed + 30):
            keys = keys_of(batch)
            buffers = [bytearray(size_of(key)) for key in keys]
            transfer = store.load(keys, buffers)
            good = transfer.wait(WAIT_S)
            for key, buffer, hit in zip(keys, buffers, good, strict=True):
                assert not hit or buffer == block(key), "a wrong byte was served"
            assert set(transfer.outcomes) <= {Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT}
            assert batch > flushed or all(good), f"batch {batch} of {flushed} flushed ones is lost"
            hits += sum(good)
        keys = make_keys(5, "after")
        assert all(store.save(keys, [block(key) for key in keys]).wait(WAIT_S))
        store.check(fix=True)
        assert store.check().clean
    return hits


def test_an_image_taken_in_mid_write_is_mounted_and_opened(disk: Disk) -> None:
    command = [sys.executable, "-c", WRITER, str(disk.root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    copies: list[tuple[Path, int]] = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            for number in range(LOSSES):
                flushed = int(writer.stdout.readline())
                flushed = int(writer.stdout.readline())
                copies.append((disk.lose_power(number), flushed))
        finally:
            writer.kill()
    hits = 0
    for number, (copy, flushed) in enumerate(copies):
        hits += _check_copy(disk.mount(copy, f"copy-{number}"), flushed)
    assert hits > 12 * LOSSES
