"""Blocks between rows of the primary region and a store: submission, deadlines, release, failed keys, byte budgets.

Knows no engine. `RewarmTier` calls it from the scheduler's thread, which must never wait:

* One load is one `store.load` of all its blocks. It is submitted by a thread of our own, because preparing a batch
  costs more than a scheduler may spend; the scheduler hands over a list per step and reads verdicts from memory.
* A job is over when its verdicts are in *and* the store has released the memory. A deadline settles the verdicts;
  rows go back to the engine only after the release.
* A key whose load failed is a miss until it is saved again.

This is the one place where a failure of the storage becomes a miss, and is counted and logged (`Failures`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.connectors.failures import LOG_INTERVAL_S, Failures
from rewarm.connectors.vllm.rows import Rows
from rewarm.store.contract import Outcome, Store, Transfer

log = logging.getLogger("vllm.rewarm")
"""Below vLLM's own logger, so that its handlers and levels apply."""

FAILED_KEYS_MAX = 100_000
"""About 20 MB of keys. Above it the oldest are forgotten: they may be tried, and fail, once more."""
SAVE_DEADLINE_S = 60.0
"""Saves wait behind a full queue; a deadline below this would drop what a slow drive still writes."""


RowNumbers = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Numbers of rows, one for each key."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one tier, in rows of the primary region and seconds."""

    promotion_rows: int
    """Rows that loads may occupy at one time."""
    save_rows: int
    """Rows that saves may keep pinned at one time."""
    deadline_s: float
    """A load without a verdict after this is a miss."""


class Finished(msgspec.Struct, frozen=True):
    """A job that is over. `good` are the keys that were restored or stored; None means all of them."""

    job: int
    good: list[bytes] | None
    seconds: float
    moved_bytes: int


class _Job:
    """One load or save under way."""

    __slots__ = (
        "cut",
        "deadline_s",
        "keys",
        "loading",
        "number",
        "replicating",
        "rows",
        "start_s",
        "transfer",
    )

    def __init__(self, number: int, keys: Sequence[bytes], rows: RowNumbers, loading: bool, limit_s: float) -> None:
        self.number = number
        self.keys = keys
        self.rows = rows
        self.loading = loading
        self.start_s = time.monotonic()
        self.deadline_s = self.start_s + limit_s
        self.transfer: Transfer | None = None
        self.cut = False
        """Some blocks were refused before the store saw them."""
        self.replicating = 0
        """0: not asked for, 1: under way, 2: done."""


class Traffic:
    """All jobs of one tier. Its methods are called by one thread, the scheduler's; jobs start with `end_step`."""

    def __init__(self, store: Store, rows: Rows, limits: Limits) -> None:
        self.failures = Failures(log)
        self.failed: dict[bytes, None] = {}
        """Keys that are a miss until they are saved again, oldest first."""
        self.offers = limits.promotion_rows
        """Rows that the scheduler may still fill in this step; it takes one for each block that it says is there."""
        self.loaded_bytes = 0
        self.saved_bytes = 0
        self._store = store
        self._rows = rows
        self._limits = limits
        self._active: list[_Job] = []
        self._waiting: list[_Job] = []
        self._over: list[Finished] = []
        self._loading_rows = 0
        self._saving_rows = 0
        self._work: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._submit_all, name="rewarm-vllm", daemon=True)
        self._thread.start()

    # Asked by the scheduler.

    def holds(self, key: bytes) -> bool:
        """Whether the store has a block that has not failed. Reads memory only."""
        return key in self._store and key not in self.failed

    def end_step(self) -> None:
        """Hand the jobs of this step to the thread that submits; offers that led to no load are void.

        Not before: the thread would ask for the interpreter lock in the middle of the scheduler's step.
        """
        self.offers = self._limits.promotion_rows - self._loading_rows
        if self._waiting:
            self._work.put(self._waiting)
            self._waiting = []

    def load(self, number: int, keys: Sequence[bytes], rows: RowNumbers) -> None:
        """Restore blocks into rows; the result comes from `finished`. Keeps both until then."""
        self._loading_rows += len(keys)
        self._start(_Job(number, keys, rows, True, self._limits.deadline_s))

    def save(self, number: int, keys: Sequence[bytes], rows: RowNumbers) -> None:
        """Store rows; what does not fit the budget is refused now, the last blocks first. Keeps both until the end."""
        fits = max(0, self._limits.save_rows - self._saving_rows)
        refused = len(keys) - fits
        taken = keys
        if refused > 0:
            self.failures.note({f"save {Outcome.REFUSED_BUDGET}": refused})
            taken, rows = keys[:fits], rows[:fits]
        if not taken:
            self._over.append(Finished(number, [], 0.0, 0))
            return
        self._saving_rows += len(taken)
        job = _Job(number, taken, rows, False, max(SAVE_DEADLINE_S, self._limits.deadline_s))
        job.cut = refused > 0
        self._start(job)

    def finished(self) -> list[Finished]:
        """Jobs that are over since the last call. Enforces deadlines."""
        over, self._over = self._over, []
        if self._active:
            now_s = time.monotonic()
            alive = self._thread.is_alive()
            still = []
            for job in self._active:
                if self._is_over(job, now_s, alive):
                    over.append(self._end(job, now_s))
                else:
                    still.append(job)
            self._active = still
        return over

    def busy(self) -> bool:
        """True while a job is under way."""
        return bool(self._active or self._over)

    # The end.

    def drain(self) -> None:
        """Wait until no job touches the rows. Gives every job up at its deadline, then waits for the release."""
        warned_s = time.monotonic()
        while self._active:
            self.end_step()
            ended = self.finished()
            self._over.extend(ended)
            time.sleep(0.001)
            if self._active and time.monotonic() - warned_s > LOG_INTERVAL_S:
                warned_s = time.monotonic()
                log.warning("rewarm: waiting for the storage to release %d transfers", len(self._active))

    def stop(self, timeout_s: float) -> None:
        """End the thread and give loads up; saves go on. The store is closed next, and `wait_released` asked then."""
        self.end_step()
        self._work.put(None)
        self._thread.join(timeout_s)
        for job in self._active:
            if job.transfer is not None and job.loading:
                job.transfer.cancel()

    def wait_released(self, timeout_s: float) -> bool:
        """True when no job can touch the rows any more."""
        end_s = time.monotonic() + timeout_s
        transfers = [job.transfer for job in self._active if job.transfer is not None]
        released = all(transfer.wait_released(max(0.0, end_s - time.monotonic())) for transfer in transfers)
        return released and not self._thread.is_alive()

    # The thread that submits.

    def _submit_all(self) -> None:
        while (jobs := self._work.get()) is not None:
            for job in jobs:
                self._submit(job)

    def _submit(self, job: _Job) -> None:
        rows = np.asarray(job.rows).tolist()
        if job.replicating:
            self._rows.replicate(rows)
            job.replicating = 2
            return
        move = self._store.load if job.loading else self._store.save
        job.transfer = move(job.keys, self._rows.blocks(rows))

    def _start(self, job: _Job) -> None:
        self._active.append(job)
        self._waiting.append(job)

    # What became of a job.

    def _is_over(self, job: _Job, now_s: float, alive: bool) -> bool:
        """A thread that has died (a bug of ours: its traceback is on stderr) ends the jobs it did not submit."""
        transfer = job.transfer
        if transfer is None:
            return not alive
        if not transfer.done():
            if now_s < job.deadline_s:
                return False
            transfer.wait(0)
        if not transfer.released():
            return False
        if job.loading and self._rows.replicated and job.replicating < 2:
            if not job.replicating and alive:
                job.replicating = 1
                self._waiting.append(job)
            return not alive
        return True

    def _end(self, job: _Job, now_s: float) -> Finished:
        good = self._verdicts(job)
        moved = len(job.keys if good is None else good) * self._rows.block_bytes
        if job.loading:
            self._loading_rows -= len(job.keys)
            self.offers += len(job.keys)
            self.loaded_bytes += moved
        else:
            self._saving_rows -= len(job.keys)
            self.saved_bytes += moved
            for key in job.keys if good is None else good:
                self.failed.pop(key, None)
        return Finished(job.number, good, now_s - job.start_s, moved)

    def _verdicts(self, job: _Job) -> list[bytes] | None:
        """The good keys of a job, None for all; the others are counted, logged and, after a load, remembered."""
        kind = "load" if job.loading else "save"
        if job.transfer is None or (job.loading and self._rows.replicated and job.replicating < 2):
            good: list[bytes] = []
            self.failures.note({f"{kind} {Outcome.LOST_MEDIUM}": len(job.keys)})
        else:
            mask = job.transfer.wait(0)
            if all(mask):
                return list(job.keys) if job.cut else None
            good = [key for key, ok in zip(job.keys, mask, strict=True) if ok]
            self.failures.of(kind, job.transfer)
        if job.loading:
            self._remember(set(job.keys) - set(good))
        return good

    def _remember(self, keys: set[bytes]) -> None:
        self.failed.update(dict.fromkeys(keys))
        while len(self.failed) > FAILED_KEYS_MAX:
            del self.failed[next(iter(self.failed))]
