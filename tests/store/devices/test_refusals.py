"""What a kernel may say no to while a device is made or runs: an error that names the call, and nothing left behind.

The kernel of the test machine grants these calls, so the answer of one system call is replaced; the rest is real.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.store.devices.helpers import BLOCK, DEPTH, block_reads, operations, results

from rewarm.errors import MisuseError, StorageError
from rewarm.store.devices import batch, kernel, ring, threads
from rewarm.store.devices.aio import AioDevice
from rewarm.store.devices.base import SYNC
from rewarm.store.devices.select import LADDER
from rewarm.store.devices.threads import ThreadsDevice, execute
from rewarm.store.devices.uring import UringDevice

Answer = Callable[[str, int, int], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answer]:
    """`answer(call, error, times)`: the kernel refuses this system call so many times."""
    planned: dict[int, list[int]] = {}
    plain = kernel.call

    def refusing(number: int, *arguments: int) -> int:
        left = planned.get(number)
        return left.pop() if left else plain(number, *arguments)

    def plan(call: str, error: int, times: int) -> None:
        planned[kernel.number_of(call)] = [-error] * times

    monkeypatch.setattr(kernel, "call", refusing)
    yield plan
    assert not any(planned.values()), "a planned refusal was never met"


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert "io_uring" not in Path("/proc/self/maps").read_text()


def made(rung: type[UringDevice] | type[AioDevice]) -> UringDevice | AioDevice:
    try:
        return rung(DEPTH)
    except StorageError as error:
        pytest.skip(f"this machine has no {rung.name}: {error}")


# While a device is made.


@pytest.mark.parametrize("rung", [UringDevice, AioDevice])
def test_no_eventfd(
    rung: type[UringDevice] | type[AioDevice], nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(rung).close()

    def refused(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "eventfd", refused)
    with pytest.raises(StorageError, match="eventfd: EMFILE"):
        rung(DEPTH)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [("io_setup", errno.EAGAIN, r"EAGAIN.*aio-max-nr"), ("io_setup", errno.EPERM, r"EPERM \([^;]*$")],
)
def test_no_context_for_aio(answer: Answer, nothing_left: None, call: str, error: int, says: str) -> None:
    answer(call, error, 1)
    with pytest.raises(StorageError, match=f"{call}: {says}"):
        AioDevice(DEPTH)


def test_no_ring(answer: Answer, nothing_left: None) -> None:
    answer("io_uring_setup", errno.EPERM, 1)
    with pytest.raises(StorageError, match="io_uring_setup: EPERM"):
        UringDevice(DEPTH)


def test_a_ring_of_flags_that_no_kernel_knows(nothing_left: None, answer: Answer) -> None:
    made(UringDevice).close()
    answer("io_uring_setup", errno.EINVAL, len(ring._SETUPS))
    with pytest.raises(StorageError, match="io_uring_setup: EINVAL"):
        UringDevice(DEPTH)


def test_a_ring_without_what_is_needed(nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made(UringDevice).close()
    monkeypatch.setitem(ring._NEEDED, "TELEPATHY", 1 << 31)
    with pytest.raises(StorageError, match=r"lacks TELEPATHY \(Linux"):
        UringDevice(DEPTH)


@pytest.mark.parametrize("granted", [0, 1])
def test_a_ring_that_cannot_be_mapped(granted: int, nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made(UringDevice).close()
    plain, left = kernel._mmap, [True] * granted

    def mapping(*arguments: object) -> object:
        if left:
            left.pop()
            return plain(*arguments)
        ctypes.set_errno(errno.ENOMEM)
        return kernel._MAP_FAILED

    monkeypatch.setattr(kernel, "_mmap", mapping)
    with pytest.raises(StorageError, match=r"mmap of \d+ bytes: ENOMEM"):
        UringDevice(DEPTH)


def test_a_ring_that_cannot_be_enabled(answer: Answer, nothing_left: None) -> None:
    device = made(UringDevice)
    answer("io_uring_register", errno.EBADFD, 1)
    with pytest.raises(StorageError, match="io_uring_register: EBADFD"):
        device.reap(0)
    device.close()


def test_a_kernel_that_pins_no_buffers_is_noted(
    answer: Answer, fd: int, arena: npt.NDArray[np.uint8], content: npt.NDArray[np.uint8]
) -> None:
    device = made(UringDevice)
    assert isinstance(device, UringDevice)
    device.reap(0)
    answer("io_uring_register", errno.ENOMEM, 1)
    assert device.register(arena.ctypes.data, arena.nbytes) == 0
    assert any("registered buffers: ENOMEM" in line for line in device.notes)
    assert set(results(device, block_reads(fd, arena, np.arange(DEPTH))).values()) == {BLOCK}
    assert np.array_equal(arena[: DEPTH * BLOCK], content[: DEPTH * BLOCK])
    device.close()


# While it runs.


@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_a_ring_that_is_refused_for_a_moment_goes_on(
    error: int, answer: Answer, fd: int, arena: npt.NDArray[np.uint8]
) -> None:
    device = made(UringDevice)
    answer("io_uring_enter", error, 3)
    assert set(results(device, block_reads(fd, arena, np.arange(DEPTH))).values()) == {BLOCK}
    device.close()


@pytest.mark.parametrize(
    ("rung", "call", "error", "raises", "says"),
    [
        (UringDevice, "io_uring_enter", errno.EBADR, StorageError, "io_uring_enter: EBADR"),
        (UringDevice, "io_uring_enter", errno.EEXIST, MisuseError, "thread"),
        (AioDevice, "io_getevents", errno.EINVAL, StorageError, "io_getevents: EINVAL"),
    ],
)
def test_a_call_that_fails_is_named(
    rung: type[UringDevice], call: str, error: int, raises: type[Exception], says: str, answer: Answer
) -> None:
    device = made(rung)
    answer(call, error, 1)
    with pytest.raises(raises, match=says):
        device.reap(1, 5.0)
    device.close()


def test_aio_carries_out_a_sync_that_its_kernel_does_not_know(answer: Answer, fd: int) -> None:
    device = made(AioDevice)
    answer("io_submit", errno.EINVAL, 1)
    assert results(device, operations(1, fd=fd, opcode=SYNC)) == {0: 0}
    answer("io_submit", errno.EINVAL, 1)
    assert results(device, operations(1, fd=-1, opcode=SYNC)) == {0: -errno.EBADF}
    device.close()


def test_aio_without_room_for_a_wake_wakes_at_the_time_limit(answer: Answer) -> None:
    device = made(AioDevice)
    outcome: list[int] = []
    waiter = threading.Thread(target=lambda: outcome.append(len(device.reap(1, 0.2))))
    waiter.start()
    while not getattr(device, "_need", 0):
        os.sched_yield()
    answer("io_submit", errno.EAGAIN, 1)
    device.wake()
    waiter.join(30.0)
    assert outcome == [0]
    device.close()


# Threads.


def test_where_no_thread_can_start_the_device_is_unusable(
    fd: int, arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device = ThreadsDevice(DEPTH)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(StorageError, match="threads: can't start"):
            device.submit(block_reads(fd, arena, np.arange(3)))
    device.close()


def test_where_only_one_thread_can_start_it_does_everything(
    fd: int, arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, started = threading.Thread.start, []

    def one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        plain(thread)

    device = ThreadsDevice(DEPTH)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", one)
        assert set(results(device, block_reads(fd, arena, np.arange(DEPTH))).values()) == {BLOCK}
    device.close()


@pytest.mark.parametrize(("call", "opcode", "result"), [("_pread", 0, BLOCK), ("_fdatasync", SYNC, 0)])
def test_a_signal_in_a_system_call_is_no_error(
    call: str, opcode: int, result: int, fd: int, arena: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, interrupts = getattr(threads, call), [1, 1]

    def interrupted(*arguments: int) -> int:
        if interrupts:
            interrupts.pop()
            ctypes.set_errno(errno.EINTR)
            return -1
        return int(plain(*arguments))

    monkeypatch.setattr(threads, call, interrupted)
    assert execute((0, opcode, fd, 0, arena.ctypes.data, BLOCK)) == result
    assert not interrupts


# Any rung.


@pytest.mark.parametrize("name", list(LADDER))
def test_memory_is_given_back_before_and_after_the_end(name: str, arena: npt.NDArray[np.uint8]) -> None:
    device = LADDER[name](DEPTH)
    half = arena.nbytes // 2
    for start in (0, half):
        device.register(arena.ctypes.data + start, half)  # type: ignore[attr-defined]
    device.unregister(arena.ctypes.data, half)  # type: ignore[attr-defined]
    if name == "uring":
        with contextlib.suppress(StorageError), pytest.raises(MisuseError, match="registered already"):
            device.register(arena.ctypes.data + half, half)  # type: ignore[attr-defined]
    device.close()
    device.unregister(arena.ctypes.data + half, half)  # type: ignore[attr-defined]
    with pytest.raises(MisuseError, match="closed"):
        device.register(arena.ctypes.data, half)  # type: ignore[attr-defined]


def test_close_beside_a_call_that_does_not_come_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "CLOSE_WAIT_S", 0.01)
    device = ThreadsDevice(DEPTH)
    with device._owner:
        start_s = time.monotonic()
        device.close()
        assert time.monotonic() - start_s < 5.0
    with pytest.raises(MisuseError, match="clos"):
        device.reap(0)
