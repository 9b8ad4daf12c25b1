"""Processes that use a pool from the outside: each with a host identity of its own, told what to do through a pipe.

The interpreter with Rewarm in it is forked before any store is opened, because under emulation its start takes long.
Every question has a bound: a process that does not answer within it is the finding.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lab.nvmeof.guest.hosts import share

import rewarm
from rewarm.errors import RewarmError
from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.store.raw.formatting import format_device
from rewarm.testing import payload

NAMESPACE = "nvme-of lab"
BLOCK_BYTES = 128 << 10
CLONE_NEWNS = 0x20000
FOR_EVER = "_for_ever"
"""Ends the name of what a worker does again and again, with an answer each time, until it is told something else."""

HALT = "halt"
PAUSE_S = 0.1
"""Between two loads, the second after misses: an outage makes misses as fast as they are asked for."""

Answer = dict[str, Any]
Region = npt.NDArray[np.uint8]


class Peer:
    """A process of its own. Methods of `Worker` are called by name; `ask` waits, `tell` and `answer` do not."""

    def __init__(self, machine: str = "") -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, machine), daemon=True)
        self._process.start()
        far.close()

    def tell(self, what: str, **values: Any) -> None:
        """Start something."""
        self._pipe.send((what, values))

    def answer(self, timeout_s: float = 60) -> Answer:
        """What came of it. Raises `RuntimeError` when nothing comes within the bound, or the process failed."""
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"a process did not answer within {timeout_s:g} s")
        try:
            answer: Answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("a process died") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, what: str, timeout_s: float = 60, **values: Any) -> Answer:
        """Tell, and wait for the answer."""
        self.tell(what, **values)
        return self.answer(timeout_s)

    def halt(self, timeout_s: float = 60) -> list[Answer]:
        """End what goes on for ever; its answers that were not yet taken."""
        self.tell(HALT)
        answers = []
        while HALT not in (answer := self.answer(timeout_s)):
            answers.append(answer)
        return answers

    def stop(self) -> None:
        """SIGSTOP: as if the host had been suspended."""
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process.pid
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)


class Worker:
    """What a peer can be told. Blocks are numbered; the bytes of each follow from its number."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self._lent: list[tuple[Transfer, Region]] = []

    def open(self, url: str, namespace: str = NAMESPACE) -> Answer:
        """Open a pool."""
        self.store = rewarm.open(url, namespace=namespace)
        return {"device": self.opened.stats().device}

    def close(self) -> Answer:
        """Close it."""
        if self.store:
            self.store.close()
            self.store = None
        return {}

    def format(self, device: str) -> Answer:
        """Make a raw pool that this host owns: what `rewarm format` does, without its start."""
        return {"capacity": format_device(device).capacity_bytes}

    def save(self, first: int, count: int, timeout_s: float = 60) -> Answer:
        """Save blocks; which of them are published."""
        keys = block_keys(first, count)
        transfer = self.opened.save(keys, [block(key) for key in keys])
        stored = transfer.wait(timeout_s)
        return {"stored": [first + i for i, held in enumerate(stored) if held], "outcomes": names(transfer.outcomes)}

    def save_for_ever(self, first: int, step: int) -> Iterator[Answer]:
        """One batch after another."""
        for start in itertools.count(first, step):
            yield self.save(start, step)

    def load(self, first: int, count: int, timeout_s: float = 60) -> Answer:
        """Load a run of blocks."""
        return self.load_each(list(range(first, first + count)), timeout_s)

    def load_for_ever(self, first: int, count: int) -> Iterator[Answer]:
        """The same run of blocks again and again."""
        while True:
            found = self.load(first, count)
            yield found
            if found["hits"] < count:
                time.sleep(PAUSE_S)

    def load_each(self, numbers: list[int], timeout_s: float = 60) -> Answer:
        """Load blocks: verdicts, not the release of memory. Wrong bytes are counted apart: there must be none."""
        self._lent = [(transfer, region) for transfer, region in self._lent if not transfer.released()]
        keys = [block_key(number) for number in numbers]
        region = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
        began_s = time.monotonic()
        transfer = self.opened.load(keys, list(region))
        hits = transfer.wait(timeout_s)
        took_s = time.monotonic() - began_s
        self._lent.append((transfer, region))
        wrong = sum(hit and bytes(row) != block(key) for key, row, hit in zip(keys, region, hits, strict=True))
        return {
            "hits": sum(hits), "wrong": wrong, "began_s": began_s, "took_s": took_s,
            "outcomes": names(transfer.outcomes),
        }  # fmt: skip

    def released(self, bound_s: float) -> Answer:
        """Whether the memory of every load so far has been given back, within seconds."""
        deadline_s = time.monotonic() + bound_s
        lent = [transfer.wait_released(max(0.0, deadline_s - time.monotonic())) for transfer, _ in self._lent]
        return {"released": all(lent)}

    def known(self, numbers: list[int]) -> list[int]:
        """Those of these blocks that are known, as the last poll left it."""
        mask = self.opened.lookup([block_key(number) for number in numbers]).mask
        return [number for number, known in zip(numbers, mask.tolist(), strict=True) if known]

    def share(self, mine: int, theirs: int, seconds: float, visible_s: float) -> Answer:
        """Be one of two hosts for so long."""
        return share(self, mine, theirs, seconds, visible_s)

    def lookup(self, first: int, count: int) -> Answer:
        """How many are known."""
        self.opened.refresh()
        return {"known": int(self.opened.lookup(block_keys(first, count)).mask.sum())}

    def evict(self, to_bytes: int) -> Answer:
        """Make room."""
        return {"freed": self.opened.evict(to_bytes=to_bytes)}

    def stats(self) -> Answer:
        """What the store counts and says."""
        found = self.opened.stats()
        return {
            "used": found.used_bytes, "unreleased": found.unreleased_bytes, "misses": dict(found.misses),
            "notes": found.notes,
        }  # fmt: skip

    def verb(self, name: str) -> Answer:
        """Call a verb without arguments: how long it took, and the error that it raised."""
        return _timed(getattr(self.opened, name))

    def open_another(self, url: str) -> Answer:
        """Open one more handle, and close it: how long that took, and the error that it raised."""
        return _timed(lambda: rewarm.open(url, namespace=NAMESPACE).close())

    @property
    def opened(self) -> Store:
        """The store that was opened."""
        assert self.store is not None
        return self.store


def _timed(action: Callable[[], object]) -> Answer:
    began_s, why = time.monotonic(), ""
    try:
        action()
    except RewarmError as refused:
        why = str(refused)
    return {"took_s": time.monotonic() - began_s, "refused": why}


def block_keys(first: int, count: int) -> list[bytes]:
    """Keys of numbered blocks."""
    return [block_key(number) for number in range(first, first + count)]


def block_key(number: int) -> bytes:
    """Key of one block."""
    return f"block-{number:020d}".encode()


def block(key: bytes) -> bytes:
    """The bytes of a block, from its key."""
    return bytes(payload(key, BLOCK_BYTES))


def names(outcomes: list[Outcome | None]) -> dict[str, int]:
    """How many of each outcome."""
    return {outcome.value if outcome else "none": outcomes.count(outcome) for outcome in set(outcomes)}


def _serve(pipe: Connection, machine: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if machine:
        _become(machine)
    worker = Worker()
    while True:
        try:
            what, values = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if what == HALT:
                pipe.send({HALT: True})
            elif what.endswith(FOR_EVER):
                for answer in getattr(worker, what)(**values):
                    pipe.send(answer)
                    if pipe.poll():
                        break
            else:
                pipe.send(getattr(worker, what)(**values))
        except Exception as error:  # noqa: BLE001  whatever it is, the case that asked shall say it
            pipe.send({"error": f"{what}: {type(error).__name__}: {error}"})


def _become(machine: str) -> None:
    """A host identity of its own, in a mount space of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot make a mount space")
    # What is mounted later is still seen here, and nothing of this one elsewhere.
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    identity = Path(f"/run/machine-id-{machine}")
    identity.write_text(machine.encode().hex().ljust(32, "0") + "\n")
    subprocess.run(["mount", "--bind", str(identity), "/etc/machine-id"], check=True)
