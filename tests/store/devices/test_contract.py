"""All three devices held to the contract in `rewarm.store.devices.base`: bytes, results, depth, waiting."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import queue
import signal
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.store.devices.helpers import BLOCK, BLOCKS, DEPTH, address_of, block_reads, hang, operations, results

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.devices import kernel
from rewarm.store.devices.base import LENGTH_MAX, READ, SYNC, WRITE, Device
from rewarm.store.devices.batch import DEPTH_MAX
from rewarm.store.devices.select import LADDER
from rewarm.store.devices.threads import ThreadsDevice

# Bytes.


def test_random_batches_agree_with_the_file(
    device: Device, fd: int, arena: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    rng = np.random.default_rng(2)
    for _ in range(40):
        count = int(rng.integers(1, DEPTH + 1))
        blocks = rng.permutation(BLOCKS)[:count]
        batch = block_reads(fd, arena, blocks)
        batch["opcode"] = rng.integers(READ, SYNC + 1, count)
        for block, opcode in zip(blocks, batch["opcode"], strict=True):
            place = slice(block * BLOCK, (block + 1) * BLOCK)
            if opcode == WRITE:
                arena[place] = rng.integers(0, 256, BLOCK, np.uint8)
                content[place] = arena[place]
            else:
                arena[place] = 0
        found = results(device, batch)
        for tag, (block, opcode) in enumerate(zip(blocks, batch["opcode"], strict=True)):
            assert found[tag] == (0 if opcode == SYNC else BLOCK)
            place = slice(block * BLOCK, (block + 1) * BLOCK)
            assert np.array_equal(arena[place], content[place] if opcode != SYNC else np.zeros(BLOCK, np.uint8))
    written = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    assert os.pread(written, len(content), 0) == content.tobytes()
    os.close(written)
    assert device.in_flight() == 0


def test_windows_keep_the_device_full(
    device: Device, fd: int, arena: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    batch = block_reads(fd, arena, np.random.default_rng(3).permutation(BLOCKS))
    started = done = 0
    while done < BLOCKS:
        room = device.depth - device.in_flight()
        device.submit(batch[started : started + room])
        started = min(BLOCKS, started + room)
        completions = device.reap(min(5, device.in_flight()))
        assert (completions["result"] == BLOCK).all()
        done += len(completions)
    assert np.array_equal(arena, content)


def test_an_operation_on_the_page_cache(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "buffered"
    with open(path, "w+b") as file:
        memory = np.frombuffer(b"unaligned, and not a block", np.uint8).copy()
        length = len(memory)
        batch = operations(1, opcode=WRITE, fd=file.fileno(), address=address_of(memory), length=length, offset=3)
        assert results(device, batch) == {0: length}
        assert path.read_bytes() == b"\0\0\0" + memory.tobytes()


def test_a_large_read_over_the_end_is_short(device: Device, fd: int) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * BLOCK * BLOCKS), np.uint8)
    batch = operations(2, fd=fd, address=address_of(memory), length=2 * BLOCK * BLOCKS, offset=[0, BLOCK * BLOCKS])
    batch["length"][1] = BLOCK
    assert results(device, batch) == {0: BLOCK * BLOCKS, 1: 0}


def test_errors_are_results(device: Device, fd: int, arena: npt.NDArray[np.uint8], tmp_path: Path) -> None:
    read_only = os.open(tmp_path / "data", os.O_RDONLY)
    batch = block_reads(fd, arena, np.arange(7))
    batch["fd"][1] = -1
    batch["fd"][3] = read_only
    batch["opcode"][3] = WRITE
    batch["opcode"][4] = SYNC
    batch["fd"][4] = 12345
    batch["address"][5] = 4096  # nothing is mapped there
    found = results(device, batch)
    os.close(read_only)
    expected = {0: BLOCK, 1: -errno.EBADF, 2: BLOCK, 3: -errno.EBADF, 4: -errno.EBADF, 5: -errno.EFAULT, 6: BLOCK}
    assert found == expected


def test_misaligned_direct_io_is_einval(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        pytest.skip("no O_DIRECT on the file system of the temporary directory")
    with contextlib.suppress(OSError):
        if os.preadv(fd, [memoryview(arena)[1:101]], 7) == 100:
            pytest.skip("the file system of the temporary directory takes O_DIRECT at any place, as memory can")
    batch = operations(1, fd=fd, address=address_of(arena) + 1, length=100, offset=7)
    assert results(device, batch) == {0: -errno.EINVAL}


def test_a_sync_ignores_its_other_fields(device: Device, fd: int) -> None:
    batch = operations(2, opcode=SYNC, fd=fd, offset=7, address=9, length=2**63)
    assert results(device, batch) == {0: 0, 1: 0}


def test_tags_come_back_whole(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    batch = block_reads(fd, arena, np.arange(3))
    batch["tag"] = [2**63 - 1, 0, 2**40]
    assert set(results(device, batch)) == {2**63 - 1, 0, 2**40}


# Depth and misuse.


def test_depth_is_a_limit_that_can_be_reached(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    for _ in range(3):
        device.submit(block_reads(fd, arena, np.arange(DEPTH)))
        assert device.in_flight() == DEPTH
        with pytest.raises(MisuseError, match="room for 0"):
            device.submit(block_reads(fd, arena, np.arange(1)))
        assert len(device.reap(DEPTH, 30.0)) == DEPTH
        assert device.in_flight() == 0


@pytest.mark.parametrize("name", list(LADDER))
@pytest.mark.parametrize("depth", [0, DEPTH_MAX + 1])
def test_an_impossible_depth(name: str, depth: int) -> None:
    with pytest.raises(ConfigError, match="depth"):
        LADDER[name](depth)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [("opcode", 3, "opcode 3"), ("tag", 2**63, "tags"), ("length", LENGTH_MAX + 1, "at most")],
)
def test_malformed_operations(device: Device, fd: int, field: str, value: int, says: str) -> None:
    batch = operations(2, fd=fd, length=1)
    batch[field][1] = value
    with pytest.raises(MisuseError, match=says):
        device.submit(batch)
    assert device.in_flight() == 0


def test_another_dtype_is_refused(device: Device) -> None:
    with pytest.raises(MisuseError, match="OPERATION"):
        device.submit(np.zeros(2, np.dtype([("tag", "<u8")])))


def test_an_empty_batch_is_nothing(device: Device) -> None:
    device.submit(operations(0))
    assert device.in_flight() == 0
    assert len(device.reap(0)) == 0


# Waiting.


def test_a_timeout_returns_nothing(device: Device) -> None:
    before = time.monotonic()
    assert len(device.reap(1, 0.02)) == 0
    assert time.monotonic() - before >= 0.02
    assert len(device.reap(1, 0.0)) == 0


def test_a_timeout_returns_what_is_there(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    with contextlib.ExitStack() as stack:
        writing = hang(device, stack, 2)
        device.submit(block_reads(fd, arena, np.arange(3)))
        found = 0
        for _ in range(200):
            found += len(device.reap(5, 0.05))
            if found == 3:
                break
        assert found == 3
        assert device.in_flight() == 2
        os.write(writing, b"xx")
        assert len(device.reap(2, 30.0)) == 2


def test_reap_of_zero_starts_and_looks(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    device.submit(block_reads(fd, arena, np.arange(DEPTH)))
    device.wake()  # must not matter: the operations are started and found all the same
    found = sum(len(device.reap(0)) for _ in itertools.takewhile(lambda _: device.in_flight(), itertools.count()))
    assert found == DEPTH


def test_a_wake_while_nothing_is_in_flight(device: Device) -> None:
    for _ in range(20):
        waker = threading.Timer(0.002, device.wake)
        waker.start()
        assert len(device.reap(1, 30.0)) == 0
        waker.join()


def test_a_wake_before_the_wait_counts(device: Device) -> None:
    device.wake()
    device.wake()
    assert len(device.reap(1, 30.0)) == 0
    before = time.monotonic()  # and it counts once
    device.reap(1, 0.02)
    assert time.monotonic() - before >= 0.02


def test_a_wake_ends_a_wait_for_many(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    with contextlib.ExitStack() as stack:
        writing = hang(device, stack, 10)
        for _ in range(50):
            waker = threading.Timer(0.001, device.wake)
            waker.start()
            assert len(device.reap(10)) == 0
            waker.join()
        assert device.in_flight() == 10
        device.submit(block_reads(fd, arena, np.arange(5)))
        os.write(writing, b"x" * 10)
        assert len(device.reap(15, 30.0)) == 15


def test_a_wake_just_before_the_kernel_waits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the device has looked for a wake the last time, and before the kernel watches for one."""
    call = kernel.call
    due = False

    def waking_first(*arguments: int) -> int:
        nonlocal due
        if due:
            due = False
            device.wake()
        return call(*arguments)

    with contextlib.ExitStack() as stack:
        hang(device, stack, 10)
        monkeypatch.setattr(kernel, "call", waking_first)
        for _ in range(20):
            due = True
            if isinstance(device, ThreadsDevice):
                device.wake()  # its wait looks under the lock that a wake takes: there is no such moment
            assert len(device.reap(10)) == 0
        monkeypatch.undo()


def test_no_wake_is_lost(device: Device) -> None:
    """Every item put before a wake is found by a wait that has no other end than the wake."""
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    found: list[int] = []

    def produce() -> None:
        for item in range(3000):
            items.put(item)
            device.wake()
            if item % 7 == 0:  # let the consumer fall asleep now and then
                while not items.empty():
                    os.sched_yield()

    producer = threading.Thread(target=produce)
    producer.start()
    while len(found) < 3000:
        while not items.empty():
            found.append(items.get())
        if len(found) < 3000:
            device.reap(1, 20.0)
            assert not items.empty() or producer.is_alive()
    producer.join()
    assert found == list(range(3000))


def test_signals_do_not_disturb(
    device: Device, fd: int, arena: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    caught = 0

    def count(*_: object) -> None:
        nonlocal caught
        caught += 1

    previous = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        rng = np.random.default_rng(4)
        while caught < 20:
            device.reap(1, 0.003)
            found = results(device, block_reads(fd, arena, rng.permutation(BLOCKS)[:DEPTH]))
            assert set(found.values()) == {BLOCK}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    read = arena != 0
    assert np.array_equal(arena[read], content[read])
