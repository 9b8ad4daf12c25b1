"""What the device suites share: batches of block reads, and operations that hang until they are told to end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from unittest import mock

import numpy as np
import numpy.typing as npt

from rewarm.store.devices import kernel, threads
from rewarm.store.devices.aio import _IOCB, _POLLIN, AioDevice
from rewarm.store.devices.base import OPERATION, Device, Operations
from rewarm.store.devices.threads import ThreadsDevice

BLOCK = 4096
BLOCKS = 256
DEPTH = 29  # no power of two: the rings wrap inside a batch


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
