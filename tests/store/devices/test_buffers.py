"""Registered buffers: the same bytes with and without, refusals that can be seen, memory that can be given back."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rewarm.errors import MisuseError, StorageError
from rewarm.store.devices import buffers
from rewarm.store.devices.base import OPERATION, SYNC, WRITE, Operations, Registers
from rewarm.store.devices.select import LADDER
from rewarm.store.devices.uring import UringDevice

BLOCK = 4096
BLOCKS = 64
_FIXED_OPCODES = (4, 5)


@pytest.fixture
def device() -> Iterator[UringDevice]:
    try:
        made = UringDevice(BLOCKS)
    except StorageError as error:
        pytest.skip(f"this machine has no io_uring: {error}")
    yield made
    made.close()


@pytest.fixture
def fixed(device: UringDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operations of each batch went to the kernel as fixed ones."""
    counts: list[int] = []
    store = device._ring.store

    def counting(entries: npt.NDArray[np.void]) -> None:
        counts.append(int(np.isin(entries["opcode"], _FIXED_OPCODES).sum()))
        store(entries)

    monkeypatch.setattr(device._ring, "store", counting)
    return counts


@pytest.fixture
def content() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, BLOCK * BLOCKS, np.uint8)


@pytest.fixture
def fd(tmp_path: Path, content: npt.NDArray[np.uint8]) -> Iterator[int]:
    (tmp_path / "data").write_bytes(content.tobytes())
    opened = os.open(tmp_path / "data", os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def arena() -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, BLOCK * BLOCKS), np.uint8)


def blocks(fd: int, arena: npt.NDArray[np.uint8]) -> Operations:
    made = np.zeros(BLOCKS, OPERATION)
    places = np.arange(BLOCKS) * BLOCK
    made["tag"], made["fd"], made["length"] = np.arange(BLOCKS), fd, BLOCK
    made["offset"], made["address"] = places, places + arena.ctypes.data
    return made


def run(device: UringDevice, batch: Operations) -> dict[int, int]:
    device.submit(batch)
    found = device.reap(len(batch), 30.0)
    assert len(found) == len(batch)
    return dict(found.tolist())


def test_only_what_lies_whole_inside_is_fixed(
    device: UringDevice,
    fixed: list[int],
    fd: int,
    arena: npt.NDArray[np.uint8],
    content: npt.NDArray[np.uint8],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "SLICE_BYTES", 8 * BLOCK + 512)  # edges in the middle of a block
    address = int(arena.ctypes.data)
    first = device.register(address + 4 * BLOCK, 24 * BLOCK)  # three slices, two edges inside a block
    second = device.register(address + 40 * BLOCK + 1, 4 * BLOCK)  # five blocks touched, three whole
    assert (first, second) == (24 * BLOCK, 4 * BLOCK)
    assert set(run(device, blocks(fd, arena)).values()) == {BLOCK}
    assert np.array_equal(arena, content)
    assert fixed[0] == 24 - 2 + 3
    assert device.notes == []


def test_fixed_writes_and_syncs(
    device: UringDevice, fixed: list[int], fd: int, arena: npt.NDArray[np.uint8], tmp_path: Path
) -> None:
    assert device.register(int(arena.ctypes.data), arena.nbytes) == arena.nbytes
    arena[:] = 7
    batch = blocks(fd, arena)
    batch["opcode"] = WRITE
    batch["opcode"][5] = SYNC
    assert run(device, batch) == {tag: 0 if tag == 5 else BLOCK for tag in range(BLOCKS)}
    assert fixed[0] == BLOCKS - 1
    written = np.frombuffer((tmp_path / "data").read_bytes(), np.uint8).reshape(BLOCKS, BLOCK)
    assert (written == 7).all(axis=1).sum() == BLOCKS - 1


def test_unregistered_memory_can_be_replaced(
    device: UringDevice, fixed: list[int], fd: int, arena: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    address = int(arena.ctypes.data)
    for _ in range(3):
        device.register(address, 8 * BLOCK)
        run(device, blocks(fd, arena))
        device.unregister(address, arena.nbytes)
        run(device, blocks(fd, arena))
        assert np.array_equal(arena, content)
        arena[:] = 0
    assert [count for count in fixed if count] == [8, 8, 8]


def test_overlapping_memory_is_misuse(device: UringDevice, arena: npt.NDArray[np.uint8]) -> None:
    address = int(arena.ctypes.data)
    device.register(address, 8 * BLOCK)
    with pytest.raises(MisuseError, match="unregister"):
        device.register(address + 7 * BLOCK, 8 * BLOCK)


def test_what_cannot_be_pinned_is_noted(
    device: UringDevice, fixed: list[int], fd: int, arena: npt.NDArray[np.uint8]
) -> None:
    assert device.register(4096, 4096) == 0  # nothing is mapped there
    assert "EFAULT" in device.notes[0]
    assert set(run(device, blocks(fd, arena)).values()) == {BLOCK}
    assert fixed[0] == 0


def test_a_full_table_is_noted(
    device: UringDevice, arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SLOTS", 2)
    monkeypatch.setattr(buffers, "SLICE_BYTES", BLOCK)
    assert device.register(int(arena.ctypes.data), 3 * BLOCK) == 2 * BLOCK
    assert "slots" in device.notes[0]


def test_the_limit_on_locked_memory() -> None:
    body = """
    import json, mmap, os, resource
    import numpy as np
    from rewarm.store.devices.uring import UringDevice
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    if os.geteuid() == 0:
        os.seteuid(65534)  # without CAP_IPC_LOCK the limit counts
    device = UringDevice(8)
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    print(json.dumps([device.register(int(memory.ctypes.data), memory.nbytes), device.notes]))
    """
    source = "\n".join(line[4:] for line in body.splitlines())
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    if "StorageError" in done.stderr:
        pytest.skip("this machine has no io_uring")
    pinned, notes = json.loads(done.stdout)
    assert pinned == 0
    assert "ENOMEM" in notes[0]
    assert "RLIMIT_MEMLOCK" in notes[0]


@pytest.mark.parametrize("name", ["aio", "threads"])
def test_other_rungs_gain_nothing(name: str, arena: npt.NDArray[np.uint8]) -> None:
    made = LADDER[name](8)
    assert isinstance(made, Registers)
    assert made.register(int(arena.ctypes.data), arena.nbytes) == 0
    made.unregister(int(arena.ctypes.data), arena.nbytes)
    made.close()
