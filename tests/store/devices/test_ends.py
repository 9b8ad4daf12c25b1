"""How devices end, in close, fork and exec; and what is particular to one rung."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.store.devices.helpers import BLOCK, BLOCKS, DEPTH, address_of, block_reads, hang, results

from rewarm.errors import MisuseError
from rewarm.store.devices import kernel, uring
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import LADDER
from rewarm.store.devices.threads import ThreadsDevice
from rewarm.store.devices.uring import UringDevice

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
    for thread in threading.enumerate():  # of a context that an earlier test left behind
        if thread.name == "rewarm-aio-destroy":
            thread.join(30.0)
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
    made.submit(block_reads(fd, arena, np.arange(3)))
    assert isinstance(in_thread(lambda: made.reap(0)), MisuseError)
    assert isinstance(in_thread(lambda: made.register(address_of(arena), BLOCK)), MisuseError)
    assert len(made.reap(3, 30.0)) == 3  # nothing was taken away
    in_thread(made.close)
    with pytest.raises(MisuseError, match="closed"):
        made.reap(0)


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

    monkeypatch.setattr(uring, "WAIT_SLICE_S", 60.0)  # a slow medium must not cut the wait
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
