"""The faulty device: each fault does what it says to bytes, memory and results, and nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.devices.base import OPERATION, READ, SYNC, WRITE, Operations
from rewarm.store.devices.select import LADDER
from rewarm.store.devices.threads import ThreadsDevice
from rewarm.testing.faulty import FaultyDevice, Kind, bit_flip, failure, late, short, stall, torn_write

BLOCK = 4096
BLOCKS = 16


@pytest.fixture
def device() -> Iterator[FaultyDevice]:
    made = FaultyDevice(ThreadsDevice(64), seed=5)
    yield made
    made.release_stalled()
    made.close()


@pytest.fixture
def content() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (BLOCKS, BLOCK), np.uint8)


@pytest.fixture
def path(tmp_path: Path, content: npt.NDArray[np.uint8]) -> Path:
    (tmp_path / "data").write_bytes(content.tobytes())
    return tmp_path / "data"


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    try:
        opened = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def memory() -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, BLOCK * BLOCKS), np.uint8).reshape(BLOCKS, BLOCK)


def blocks(fd: int, memory: npt.NDArray[np.uint8], opcode: int = READ, count: int = BLOCKS) -> Operations:
    made = np.zeros(count, OPERATION)
    places = np.arange(count) * BLOCK
    made["tag"], made["opcode"], made["fd"], made["length"] = np.arange(count), opcode, fd, BLOCK
    made["offset"], made["address"] = places, places + memory.ctypes.data
    return made


def run(device: FaultyDevice, batch: Operations) -> dict[int, int]:
    device.submit(batch)
    found = device.reap(len(batch), 30.0)
    assert device.in_flight() == 0
    return dict(found.tolist())


@pytest.mark.parametrize("name", list(LADDER))
def test_without_faults_it_is_the_device_inside(
    name: str, fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device = FaultyDevice(LADDER[name](BLOCKS))
    assert (device.name, device.depth) == (name, BLOCKS)
    assert set(run(device, blocks(fd, memory)).values()) == {BLOCK}
    assert np.array_equal(memory, content)
    assert not device.injected
    assert device.seen == BLOCKS
    device.close()
    with pytest.raises(MisuseError):
        device.reap(0)


def test_a_failure_touches_nothing(device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], path: Path) -> None:
    before = path.read_bytes()
    device.at(2, failure())
    device.next(failure(errno.ENOSPC), opcode=WRITE)
    device.next(failure(errno.ESTALE), opcode=SYNC)
    batch = blocks(fd, memory, count=5)
    batch["opcode"][[3, 4]] = WRITE, SYNC
    assert run(device, batch) == {0: BLOCK, 1: BLOCK, 2: -errno.EIO, 3: -errno.ENOSPC, 4: -errno.ESTALE}
    assert not memory[2].any()
    assert path.read_bytes() == before
    assert device.injected == {Kind.FAILURE: 3}


def test_a_short_read(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device.next(short(), count=BLOCKS)
    for tag, result in run(device, blocks(fd, memory)).items():
        assert 0 <= result < BLOCK
        assert np.array_equal(memory[tag, :result], content[tag, :result])
        assert not memory[tag, result:].any()


def test_a_bit_flip(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device.next(bit_flip(), count=3, opcode=READ)
    assert set(run(device, blocks(fd, memory)).values()) == {BLOCK}
    flipped = np.unpackbits(memory ^ content, axis=1).sum(axis=1)
    assert flipped.tolist() == [1, 1, 1] + [0] * (BLOCKS - 3)


@pytest.mark.parametrize("error", [0, errno.EIO])
def test_a_torn_write(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8], path: Path, error: int
) -> None:
    memory[:] = ~content
    device.next(torn_write(error), count=4)
    device.next(short(), count=4)
    found = run(device, blocks(fd, memory, WRITE))
    now = np.frombuffer(path.read_bytes(), np.uint8)
    written = (now.reshape(BLOCKS, BLOCK) == memory).sum(axis=1)
    assert [found[tag] for tag in range(4)] == [-error if error else BLOCK] * 4
    assert (written[:4] % 512 == 0).all()
    assert (written[:4] < BLOCK).all()
    assert written[4:8].tolist() == [found[tag] for tag in range(4, 8)]
    assert (written[8:] == BLOCK).all()


def test_a_torn_write_at_the_end_of_the_file(device: FaultyDevice, tmp_path: Path) -> None:
    with open(tmp_path / "new", "w+b") as file:
        memory = np.full((1, BLOCK), 7, np.uint8)
        device.next(torn_write())
        assert run(device, blocks(file.fileno(), memory, WRITE, count=1)) == {0: BLOCK}
        assert (tmp_path / "new").read_bytes() == bytes([7]) * (tmp_path / "new").stat().st_size
        assert (tmp_path / "new").stat().st_size in range(0, BLOCK, 512)


def test_a_fault_that_cannot_strike_waits_for_one_that_it_can(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8]
) -> None:
    device.next(bit_flip())
    device.next(torn_write())
    batch = blocks(fd, memory, SYNC, count=2)
    assert run(device, batch) == {0: 0, 1: 0}
    assert not device.injected
    run(device, blocks(fd, memory, READ, count=1))
    run(device, blocks(fd, memory, WRITE, count=1))
    assert device.injected == {Kind.BIT_FLIP: 1, Kind.TORN_WRITE: 1}


# Time.


def test_a_stalled_read_writes_memory_only_when_released(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device.next(stall(), count=2)
    device.submit(blocks(fd, memory, count=4))
    found = []
    while len(found) < 2:
        found += device.reap(4, 0.01).tolist()
    assert sorted(found) == [(2, BLOCK), (3, BLOCK)]
    assert (device.in_flight(), device.stalled()) == (2, 2)
    assert not memory[:2].any()
    releaser = threading.Timer(0.005, device.release_stalled)
    releaser.start()
    assert sorted(device.reap(2, 30.0).tolist()) == [(0, BLOCK), (1, BLOCK)]
    assert np.array_equal(memory[:4], content[:4])
    assert (device.in_flight(), device.stalled()) == (0, 0)


def test_a_stalled_write_takes_the_memory_as_it_is_when_released(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], path: Path, content: npt.NDArray[np.uint8]
) -> None:
    memory[:] = 1
    device.next(stall(), opcode=WRITE)
    device.submit(blocks(fd, memory, WRITE, count=1))
    assert len(device.reap(1, 0.01)) == 0
    assert path.read_bytes() == content.tobytes()
    memory[:] = 2  # given back too early
    assert device.release_stalled() == 1
    assert device.reap(1, 30.0).tolist() == [(0, BLOCK)]
    assert path.read_bytes()[:BLOCK] == bytes([2]) * BLOCK


def test_a_stalled_write_outlives_its_descriptor(
    device: FaultyDevice, memory: npt.NDArray[np.uint8], path: Path
) -> None:
    memory[:] = 3
    with open(path, "r+b") as file:
        device.next(stall())
        device.submit(blocks(file.fileno(), memory, WRITE, count=1))
    device.release_stalled()
    assert device.reap(1, 30.0).tolist() == [(0, BLOCK)]
    assert path.read_bytes()[:BLOCK] == bytes([3]) * BLOCK


def test_a_late_read_completes_by_itself(
    device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device.next(late(0.02), count=BLOCKS)
    assert set(run(device, blocks(fd, memory)).values()) == {BLOCK}
    assert np.array_equal(memory, content)
    assert device.injected == {Kind.LATE: BLOCKS}


def test_a_late_read_writes_memory_even_after_close(
    fd: int, memory: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device = FaultyDevice(ThreadsDevice(64))
    device.next(late(0.02))
    device.next(stall())
    device.submit(blocks(fd, memory, count=2))
    device.close()
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join(30.0)
    assert np.array_equal(memory[0], content[0])
    assert not memory[1].any()
    assert device.release_stalled() == 1
    assert np.array_equal(memory[1], content[1])


def test_a_late_sync_and_a_bad_descriptor(device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8]) -> None:
    device.next(late(0.001), count=4)
    batch = blocks(fd, memory, SYNC, count=4)
    batch["fd"][1:] = -1
    batch["opcode"][1:] = READ, WRITE, SYNC
    assert run(device, batch) == {0: 0, 1: -errno.EBADF, 2: -errno.EBADF, 3: -errno.EBADF}


# The contract.


def test_depth_counts_what_is_stalled(fd: int, memory: npt.NDArray[np.uint8]) -> None:
    device = FaultyDevice(ThreadsDevice(4))
    device.next(stall(), count=3)
    device.submit(blocks(fd, memory, count=3))
    with pytest.raises(MisuseError, match="room for 1"):
        device.submit(blocks(fd, memory, count=2))
    assert run_one_more(device, fd, memory) == [(0, BLOCK)]
    device.release_stalled()
    assert len(device.reap(3, 30.0)) == 3
    device.close()


def run_one_more(device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8]) -> list[tuple[int, int]]:
    device.submit(blocks(fd, memory, count=1))
    found: list[tuple[int, int]] = device.reap(1, 30.0).tolist()
    return found


def test_a_wake_ends_a_wait_for_what_is_stalled(device: FaultyDevice, fd: int, memory: npt.NDArray[np.uint8]) -> None:
    device.next(stall())
    device.submit(blocks(fd, memory, count=1))
    device.wake()
    assert len(device.reap(1)) == 0
    waker = threading.Timer(0.005, device.wake)
    waker.start()
    assert len(device.reap(1)) == 0
    assert len(device.reap(1, 0.01)) == 0


def test_the_seed_decides(fd: int, memory: npt.NDArray[np.uint8]) -> None:
    def struck(seed: int) -> list[int]:
        device = FaultyDevice(ThreadsDevice(64), seed=seed)
        device.chance(failure(), 0.3)
        found = [run(device, blocks(fd, memory)) for _ in range(8)]
        device.heal()
        assert set(run(device, blocks(fd, memory)).values()) == {BLOCK}
        assert device.injected[Kind.FAILURE] == sum(result < 0 for one in found for result in one.values())
        device.close()
        return [result for one in found for _, result in sorted(one.items())]

    assert struck(1) == struck(1)
    assert struck(1) != struck(2)
    assert 0 < sum(result < 0 for result in struck(1)) < 8 * BLOCKS


def test_a_probability_is_checked(device: FaultyDevice) -> None:
    with pytest.raises(ConfigError, match="probability"):
        device.chance(stall(), 1.5)
