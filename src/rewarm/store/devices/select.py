"""The ladder: which device serves a directory, decided by doing real I/O there, and why not the better ones.

uring, then aio, then threads: the first that writes, syncs and reads back correctly with O_DIRECT. Where O_DIRECT does
not exist, in memory and over a network or FUSE, threads are the fastest and are chosen at once. Nothing is silent:
every rung not taken has a line in `Choice.refusals`. Nothing is left behind in the directory.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rewarm.errors import ConfigError, StorageError
from rewarm.store.devices import kernel, medium
from rewarm.store.devices.aio import AioDevice
from rewarm.store.devices.base import OPERATION, Device
from rewarm.store.devices.medium import Medium
from rewarm.store.devices.threads import ThreadsDevice
from rewarm.store.devices.uring import UringDevice

LADDER: dict[str, Callable[[int], Device]] = {"uring": UringDevice, "aio": AioDevice, "threads": ThreadsDevice}
"""Name to constructor (of a depth), best first."""

PROBE_TIMEOUT_S = 10.0
"""A medium that does not complete 4 KiB within this time fails the rung."""


@dataclass(frozen=True)
class Choice:
    """What serves a directory. `open()` makes one device; make as many as needed, each for its own thread.

    `direct` says whether files are to be opened with O_DIRECT, whatever the rung; `alignment` is then what memory,
    offset and length of every operation must be multiples of (bytes, at least 512). `refusals` are lines for people.
    """

    name: str
    depth: int
    direct: bool
    alignment: int
    refusals: list[str]
    filesystem: str
    network: bool

    def open(self) -> Device:
        """A new device. Raises `StorageError` if the machine refuses it now."""
        return LADDER[self.name](self.depth)


def choose_device(
    directory: str | os.PathLike[str],
    *,
    prefer: str = "auto",
    depth: int = 128,
    writable: bool = True,
    sample: str | os.PathLike[str] | None = None,
) -> Choice:
    """Choose the device for `directory` by trying. With `prefer` only that rung is tried.

    With `writable=False` nothing is written: rungs are tried by reading `sample`, an existing file there, and without
    one only by being created. The same holds on a full disk. Raises `ConfigError` for an unknown `prefer` or a
    directory that does not exist, `StorageError` where no rung (or not the preferred one) works.
    """
    _check_known(prefer)
    path, sample_path = os.fspath(directory), None if sample is None else os.fspath(sample)
    found = medium.examine(path, writable=writable, sample=sample_path)
    wanted = "no device" if prefer == "auto" else f"device={prefer}"
    return _first_that_works(path, found, sample_path, prefer, depth, f"{wanted} works in {path} ({found.filesystem})")


def choose_for_file(path: str, *, direct: bool, prefer: str = "auto", depth: int = 128) -> Choice:
    """Choose the device for one block device or file that is there, by reading it. Raises as `choose_device`."""
    _check_known(prefer)
    found = medium.examine_file(path, direct=direct)
    return _first_that_works(path, found, path, prefer, depth, f"no device works on {path}")


def _first_that_works(path: str, found: Medium, sample: str | None, prefer: str, depth: int, none: str) -> Choice:
    """The first rung that works there, or the preferred one. Raises `StorageError` with `none` and every refusal."""
    refusals = list(found.notes)
    for name in LADDER if prefer == "auto" else (prefer,):
        reason = (prefer == "auto" and _slower(name, found)) or _try(name, depth, path, found, sample)
        if not reason:
            return Choice(name, depth, found.direct, found.alignment, refusals, found.filesystem, found.network)
        refusals.append(f"{name}: {reason}")
    raise StorageError(f"{none}: {'; '.join(refusals)}")


def _check_known(prefer: str) -> None:
    choices = ["auto", *LADDER]
    if prefer in choices:
        return
    near = difflib.get_close_matches(prefer, choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"unknown device {prefer!r}; one of {', '.join(choices)}{hint}")


def _slower(name: str, found: Medium) -> str:
    """Why a ring would lose against threads there; empty if it would not."""
    if name == "threads":
        return ""
    if found.memory or found.network:
        return f"not used on {found.filesystem}, where threads are faster"
    return "" if found.direct else "not used without O_DIRECT, where threads are faster"


def _try(name: str, depth: int, directory: str, found: Medium, sample: str | None) -> str:
    """Create the rung and do real I/O through it; why it failed, or empty."""
    try:
        device = LADDER[name](depth)
        try:
            run = _runner(device)
            if found.writable:
                with medium.nameless_file(directory, os.O_DIRECT if found.direct else 0) as fd:
                    medium.round_trip(fd, found.alignment, run)
            elif sample is not None:
                with medium.open_sample(sample, direct=found.direct) as fd:
                    medium.read_back(fd, found.alignment, run)
        finally:
            device.close()
    except StorageError as error:
        return str(error)
    except OSError as error:
        if error.errno in medium.NO_ROOM:  # the disk has just been filled by somebody: no fault of the rung
            return ""
        return f"probe: {kernel.describe(error.errno or 0)}"
    return ""


def _runner(device: Device) -> medium.Run:
    operation = np.zeros(1, OPERATION)

    def run(opcode: int, fd: int, offset: int, address: int, length: int) -> int:
        operation[0] = (0, opcode, fd, offset, address, length)
        device.submit(operation)
        completions = device.reap(1, PROBE_TIMEOUT_S)
        return int(completions["result"][0]) if len(completions) else -errno.ETIMEDOUT

    return run
