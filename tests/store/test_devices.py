"""All three devices held to the contract in `rewarm.store.devices.base`, on real files and real descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.devices import kernel, threads
from rewarm.store.devices.aio import _IOCB, _POLLIN, AioDevice
from rewarm.store.devices.base import LENGTH_MAX, OPERATION, READ, SYNC, WRITE, Device, Operations
from rewarm.store.devices.batch import DEPTH_MAX
from rewarm.store.devices.select import LADDER
from rewarm.store.devices.threads import ThreadsDevice
from rewarm.store.devices.uring import UringDevice

BLOCK = 4096
BLOCKS = 256
DEPTH = 29  # no power of two: the rings wrap inside a batch


@pytest.fixture(params=list(LADDER))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each rung in turn."""
    made = LADDER[request.param](DEPTH)
    yield made
    made.close()


@pytest.fixture
def content() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, BLOCK * BLOCKS, np.uint8)


@pytest.fixture
def fd(tmp_path: Path, content: npt.NDArray[np.uint8]) -> Iterator[int]:
    """A file of `content`, opened with O_DIRECT where the file system has it."""
    path = tmp_path / "data"
    path.write_bytes(content.tobytes())
    try:
        opened = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def arena() -> npt.NDArray[np.uint8]:
    """Page-aligned memory, as long as the file."""
    return np.frombuffer(mmap.mmap(-1, BLOCK * BLOCKS), np.uint8)


def operations(count: int, **fields: object) -> Operations:
    made = np.zeros(count, OPERATION)
    made["tag"] = np.arange(count)
    for name, value in fields.items():
        made[name] = value
    return made


def address_of(memory: npt.NDArray[np.uint8]) -> int:
    return int(memory.ctypes.data)


def block_reads(fd: int, arena: npt.NDArray[np.uint8], blocks: npt.NDArray[np.int64]) -> Operations:
    places = blocks.astype(np.uint64) * np.uint64(BLOCK)
    return operations(len(blocks), fd=fd, offset=places, address=places + np.uint64(address_of(arena)), length=BLOCK)


def results(device: Device, batch: Operations) -> dict[int, int]:
    """Submit, wait for all, and return result by tag."""
    device.submit(batch)
    completions = device.reap(len(batch), 30.0)
    assert len(completions) == len(batch)
    return dict(completions.tolist())


def hang(device: Device, stack: contextlib.ExitStack, count: int) -> int:
    """Put `count` operations in flight that complete when a byte each is written to the descriptor returned."""
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    memory = np.zeros(count, np.uint8)
    if isinstance(device, AioDevice):  # Linux AIO reads a pipe inside io_submit: poll it instead, past the contract
        polls = np.zeros(count, _IOCB)
        polls["opcode"], polls["fd"], polls["address"], polls["data"] = 5, reading, _POLLIN, np.arange(count)
        pointers = polls.ctypes.data + polls.itemsize * np.arange(count, dtype=np.uint64)
        submitted = kernel.call(device._submit_number, device._context, count, pointers.ctypes.data)
        assert submitted == count
        device._in_flight += count
    else:
        if isinstance(device, ThreadsDevice):  # pread refuses a pipe: read it by a plain read, which hangs as well
            stack.enter_context(mock.patch.object(threads, "_pread", _reading_pipe(reading, threads._pread)))
        device.submit(operations(count, fd=reading, address=address_of(memory) + np.arange(count), length=1))
        device.reap(0)
    stack.callback(memory.fill, 0)  # keeps the memory until the end
    stack.callback(os.close, writing)
    return writing


def _reading_pipe(pipe: int, pread: Callable[..., int]) -> Callable[..., int]:
    return lambda fd, *rest: len(os.read(pipe, 1)) if fd == pipe else pread(fd, *rest)


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


# Ends.


def test_after_close(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    device.close()
    device.close()
    device.wake()
    with pytest.raises(MisuseError, match="closed"):
        device.submit(block_reads(fd, arena, np.arange(1)))
    with pytest.raises(MisuseError, match="closed"):
        device.reap(0)


def test_close_does_not_wait_for_what_hangs(device: Device) -> None:
    with contextlib.ExitStack() as stack:
        writing = hang(device, stack, 3)
        device.close()
        os.write(writing, b"xxx")


def test_close_while_another_thread_waits(device: Device) -> None:
    outcome: list[object] = []

    def wait() -> None:
        try:
            while True:
                outcome.append(len(device.reap(1)))
        except MisuseError as error:
            outcome.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not device._waiting:  # type: ignore[attr-defined]
        os.sched_yield()
    device.close()
    waiter.join(30.0)
    assert not waiter.is_alive()
    assert isinstance(outcome[-1], MisuseError)


def own_descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return {fd: target for fd, target in found.items() if "io_uring" in target or "eventfd" in target}


@pytest.mark.parametrize("name", list(LADDER))
def test_close_gives_everything_back(name: str) -> None:
    before = own_descriptors()
    running = threading.active_count()
    made = LADDER[name](DEPTH)
    made.reap(0)
    for descriptor in own_descriptors().keys() - before.keys():
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    made.close()
    assert own_descriptors() == before
    assert "io_uring" not in Path("/proc/self/maps").read_text()
    assert threading.active_count() == running


def test_threads_end_with_their_device(fd: int, arena: npt.NDArray[np.uint8]) -> None:
    made = ThreadsDevice(DEPTH)
    results(made, block_reads(fd, arena, np.arange(DEPTH)))
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("rewarm-io-")]
    assert workers
    made.close()
    for worker in workers:
        worker.join(30.0)
        assert not worker.is_alive()


def test_a_forked_child_cannot_use_it(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    results(device, block_reads(fd, arena, np.arange(DEPTH)))
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            device.wake()
            try:
                device.reap(0)
            except MisuseError as error:
                code = 0 if "fork" in str(error) and not own_descriptors() else 2
            device.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(results(device, block_reads(fd, arena, np.arange(DEPTH))).values()) == {BLOCK}


def test_a_fork_while_another_thread_waits(device: Device) -> None:
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            device.reap(1, 30.0)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not device._waiting:  # type: ignore[attr-defined]
        os.sched_yield()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            device.wake()
            device.close()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop.set()
    device.wake()
    waiter.join(30.0)
    assert not waiter.is_alive()


def test_a_started_program_inherits_nothing(device: Device, fd: int, arena: npt.NDArray[np.uint8]) -> None:
    results(device, block_reads(fd, arena, np.arange(3)))
    show = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True)
    shown = show.stdout
    assert "/proc/" in shown
    assert "io_uring" not in shown
    assert "eventfd" not in shown


# One rung.


def in_thread(work: object) -> object:
    """Run `work` in a thread that then ends; returns its result or its exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(work())  # type: ignore[operator]
        except MisuseError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_the_thread_that_constructs_need_not_be_the_owner(
    device: Device, fd: int, arena: npt.NDArray[np.uint8]
) -> None:
    found = in_thread(lambda: results(device, block_reads(fd, arena, np.arange(DEPTH))))
    assert isinstance(found, dict)
    assert set(found.values()) == {BLOCK}


def test_the_ring_refuses_a_second_thread(fd: int, arena: npt.NDArray[np.uint8]) -> None:
    made = UringDevice(DEPTH)
    results(made, block_reads(fd, arena, np.arange(3)))
    assert isinstance(in_thread(lambda: made.reap(0)), MisuseError)
    made.close()


def test_the_ring_makes_one_system_call_for_a_batch_and_its_wait(
    fd: int, arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = UringDevice(DEPTH)
    results(made, block_reads(fd, arena, np.arange(3)))  # the first also enables the ring
    calls: list[tuple[int, ...]] = []
    original = kernel.call

    def counted(*arguments: int) -> int:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(kernel, "call", counted)
    results(made, block_reads(fd, arena, np.arange(DEPTH)))
    assert len(calls) == 1
    made.close()


def test_an_older_kernels_ring_works_too(
    fd: int, arena: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewarm.store.devices.ring._SETUPS", (1 << 31, 0))  # flags nobody knows, then none
    if os.uname().machine != "x86_64":
        pytest.skip("refused there: see the memory order in rewarm.store.devices.ring")
    made = UringDevice(DEPTH)
    for start in range(0, BLOCKS - DEPTH, DEPTH):
        results(made, block_reads(fd, arena, np.arange(start, start + DEPTH)))
        assert np.array_equal(arena[: (start + DEPTH) * BLOCK], content[: (start + DEPTH) * BLOCK])
    assert len(made.reap(1, 0.001)) == 0
    with contextlib.ExitStack() as stack:
        hang(made, stack, 5)
        threading.Timer(0.001, made.wake).start()
        assert len(made.reap(5)) == 0
    made.close()


def test_threads_use_few_hand_overs(fd: int, arena: npt.NDArray[np.uint8]) -> None:
    """A worker takes more than one operation while the queue is long."""
    made = ThreadsDevice(depth=200, workers=2)
    taken: list[int] = []
    take = made._shared._take

    def spy() -> object:
        batch = take()
        taken.append(len(batch))
        return batch

    made._shared._take = spy  # type: ignore[assignment, method-assign]
    results(made, block_reads(fd, arena, np.arange(200)))
    made.close()
    assert sum(taken) == 200
    assert len([count for count in taken if count]) < 100
