"""Who restores: this process for all ranks together, or, in `ranks`, one process for each rank as in an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from rewarm.bench.cold import kept_resident
from rewarm.bench.destination import Destinations
from rewarm.bench.payload import Payload
from rewarm.bench.pools import Pool
from rewarm.bench.wave import Wave, WaveReading, warm_up
from rewarm.store.contract import Store
from rewarm.workload.job import Job
from rewarm.workload.sessions import Sessions
from rewarm.workload.shapes import schedule


class Readers(Protocol):
    """The targets of a run, open for reading."""

    def wave(self, name: str, concurrency: int, advance: Callable[[float], None]) -> WaveReading:
        """Run one wave on a target. Raises `StorageError` when the medium fails."""

    def devices(self, name: str) -> tuple[str, list[str]]:
        """Through which device a target is read, and why not through another."""

    def sliced(self, concurrency: int) -> bool:
        """Whether memory is too small for a whole wave."""


class LocalReaders:
    """All ranks' blocks are restored by this process; keeps the contract of `Readers`.

    `opened` hears of every store, `stack` closes them.
    """

    def __init__(
        self,
        job: Job,
        pools: dict[str, Pool],
        sessions: Sessions,
        payload: Payload,
        budget_bytes: int,
    ) -> None:
        self._job = job
        self._pools = pools
        self._sessions = sessions
        self._payload = payload
        self._destinations = Destinations(sessions.lengths, job.requests(max(job.concurrency)), budget_bytes)
        self._stores: dict[str, Store] = {}

    def open(self, stack: ExitStack, opened: Callable[[str, Store], None]) -> None:
        """Open every target; `stack` closes them, `opened` hears the name and the store of each."""
        for name, target in self._job.targets.items():
            self._stores[name] = stack.enter_context(self._pools[name].reader(target))
            warm_up(self._stores[name], self._sessions, self._payload)
            opened(name, self._stores[name])
        stack.enter_context(kept_resident())

    def wave(self, name: str, concurrency: int, advance: Callable[[float], None]) -> WaveReading:
        """See `Readers`."""
        together = self._job.targets[name].order == "together"
        store = self._stores[name]
        clients = None if self._job.shape == "wave" else schedule(self._job, concurrency)
        wave = Wave(
            store, self._sessions, self._payload, self._destinations, concurrency, advance, together=together,
            clients=clients,
        )  # fmt: skip
        return wave.run(self._pools[name].device_number)

    def devices(self, name: str) -> tuple[str, list[str]]:
        """See `Readers`."""
        stats = self._stores[name].stats()
        return stats.device, stats.device_refusals

    def sliced(self, concurrency: int) -> bool:
        """See `Readers`."""
        return not self._destinations.region(self._job.requests(concurrency)).whole
