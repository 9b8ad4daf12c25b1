"""What one of several hosts does in a run on a shared pool: fills its own sessions, restores a wave of its own or of
another host's, and reports everything about it. It knows no cluster: whoever starts it brings the others together.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from rewarm.bench.booking import book_wave, modelled_decode, times_to_first_token
from rewarm.bench.ceiling import CeilingReading, best, measure_ceiling
from rewarm.bench.cold import try_counting
from rewarm.bench.destination import MEMORY_SHARE, Destinations, available_memory
from rewarm.bench.medium import medium_of
from rewarm.bench.payload import Payload
from rewarm.bench.pools import Pool
from rewarm.bench.populate import populate
from rewarm.bench.recompute import Prefiller, percentiles
from rewarm.bench.result import Cell, CellBytes
from rewarm.bench.wave import Wave, WaveReading
from rewarm.geometry.presets import load_model
from rewarm.store.contract import Store
from rewarm.workload.job import Job
from rewarm.workload.sessions import Sessions, block_lengths


class Node:
    """One host of `count`; `places` gives each target's URL and folder on the shared mount. Close it at the end.

    Every host has sessions of its own: the job's seed and its number make them, so that another one can ask for them.
    """

    def __init__(self, job: Job, number: int, places: dict[str, tuple[str, str]], count: int) -> None:
        model = load_model(job.model)
        self.job = job
        self.number = number
        self._lengths = tuple(block_lengths(model, job.tokens, job.block_tokens, job.tp, job.kv_dtype))
        budget = int(available_memory() * MEMORY_SHARE / count)  # the others may be on this machine
        self._destinations = Destinations(self._lengths, max(job.concurrency), budget)
        self._prefiller = Prefiller.of(model, job)
        self._stack = ExitStack()
        self._readers: dict[str, Store] = {}
        self._pools = {name: _pool(url, Path(folder)) for name, (url, folder) in places.items()}

    def fill(self, name: str) -> int:
        """Store the host's own sessions at a target; returns the bytes of them."""
        sessions = self._sessions(self.number)
        with self._pools[name].writer() as store:
            populate(store, sessions, self._payload(self.number), lambda amount: None)
        self._pools[name].make_cold()
        return sessions.bytes_total

    def open(self) -> str:
        """Open a fresh handle for each target, once all hosts have stored theirs; returns the host's name."""
        for name, target in self.job.targets.items():
            self._readers[name] = self._stack.enter_context(self._pools[name].reader(target))
        return platform.node()

    def ceiling(self, name: str, begin: Callable[[], float]) -> CeilingReading | None:
        """The best raw reading while the other hosts read, too; None when there is nothing to read."""
        files = self._pools[name].segments()
        begin()
        return best(measure_ceiling(files, start=self.number / 8))

    def wave(self, name: str, concurrency: int, repeat: int, whose: int, begin: Callable[[], float]) -> Cell:
        """Restore a wave of the sessions of host `whose`; `begin` returns the start when all hosts are ready."""
        pool, store, sessions = self._pools[name], self._readers[name], self._sessions(whose)
        pool.make_cold()
        wave = Wave(store, sessions, self._payload(whose), self._destinations, concurrency, lambda amount: None)
        return self._cell(name, repeat, wave.run(pool.device_number, begin))

    def close(self) -> None:
        """Close every handle."""
        self._stack.close()

    def _sessions(self, number: int) -> Sessions:
        return Sessions(self.job.seed + number, self.job.session_count, self._lengths)

    def _payload(self, number: int) -> Payload:
        return Payload(self.job.seed + number, max(self._lengths))

    def _cell(self, name: str, repeat: int, wave: WaveReading) -> Cell:
        """The host's own share of a cell."""
        return book_wave(
            self.job,
            name,
            repeat,
            wave,
            concurrency=len(wave.restores),
            pool=self._pools[name],
            lengths=self._lengths,
            prefiller=self._prefiller,
            host=platform.node(),
        )


def _pool(url: str, folder: Path) -> Pool:
    medium = medium_of(folder)
    trial = folder.parent / f"trial-{platform.node()}-{id(medium)}"
    trial.mkdir()
    return Pool(url, folder, medium, try_counting(trial, medium), None)


def merge(cells: list[Cell]) -> Cell:
    """One cell of what several hosts did at the same time: every request of all, so that percentiles are exact.

    Rates divide the bytes of all by the time of the slowest; the verdict on coldness is the worst of them.
    """
    first, requests = cells[0], [request for cell in cells for request in cell.requests]
    seconds = max(cell.seconds for cell in cells)
    sums = [cell.bytes for cell in cells if cell.bytes is not None]
    payload = sum(each.payload for each in sums)
    worst = min(cells, key=lambda cell: ("failed", "not_provable", "proven").index(cell.cold))
    tokens = sum((cell.restored_tokens_per_s or 0.0) * cell.seconds for cell in cells)
    cpu = sum((cell.cpu_s_per_gb or 0.0) * each.payload for cell, each in zip(cells, sums, strict=True))
    return msgspec.structs.replace(
        first,
        concurrency=sum(cell.concurrency for cell in cells),
        ttft_s=percentiles(times_to_first_token(requests)),
        seconds=seconds,
        restored_tokens_per_s=tokens / seconds if seconds else 0.0,
        read_bytes_per_s=payload / seconds if seconds else 0.0,
        cpu_s_per_gb=cpu / payload if payload else None,
        client_cpu_share=max(cell.client_cpu_share for cell in cells),
        hits=sum(cell.hits for cell in cells),
        misses=sum(cell.misses for cell in cells),
        miss_causes=dict(sum((Counter(cell.miss_causes) for cell in cells), Counter[str]())),
        wrong_blocks=sum(cell.wrong_blocks for cell in cells),
        cold=worst.cold,
        cold_reason=worst.cold_reason,
        bytes=CellBytes(
            payload=payload,
            padding=sum(each.padding for each in sums),
            log=sum(each.log for each in sums),
            kernel=_total([each.kernel for each in sums]),
            device=_total([each.device for each in sums]),
        ),
        requests=requests,
        decode=first.decode and modelled_decode(requests, first.decode.tpot_s, first.decode.output_tokens),
    )


def _total(values: list[int | None]) -> int | None:
    return None if None in values else sum(filter(None, values))
