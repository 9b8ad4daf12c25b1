"""One process for each rank, as an engine has: every one restores its own blocks of every request, at the same moment.

A request is restored when the last of its ranks is. The kernel's counters are those of all ranks together, so that
bytes read by any of them are held against the bytes that they claim. The processes end with this object, with an
interruption, and with the death of their parent.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Self

import msgspec

from rewarm.bench.counters import Snapshot, take_snapshot
from rewarm.bench.pools import Pool
from rewarm.bench.rank import Answer, Begin, Failed, Moved, Order, Prepared, RankTarget, RankWave, Ready, Task
from rewarm.bench.throttle import make_shared
from rewarm.bench.wave import GRACE_S, RELEASE_S, SLOWEST_BYTES_PER_S, Restore, WaveReading
from rewarm.errors import ConfigError, StorageError
from rewarm.store.contract import Outcome
from rewarm.workload.job import Job
from rewarm.workload.sessions import Sessions, of_rank
from rewarm.workload.shapes import schedule

START_S = 60.0
"""A rank that is not ready by then will not be: it imports, opens every target and faults its memory in."""
_END_S = 5.0
_ANSWERS = msgspec.json.Decoder(Answer)


class RankReaders:
    """Keeps the contract of `Readers`; a context manager. `ranks` names the rank of every block of a session."""

    def __init__(
        self, job: Job, pools: dict[str, Pool], sessions: Sessions, ranks: Sequence[int], budget_bytes: int
    ) -> None:
        self._job = job
        self._pools = pools
        self._sessions = sessions
        self._ranks = ranks
        self._budget_bytes = budget_bytes // len(set(ranks))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._rates: dict[str, int] = {}
        self._ready: Ready = Ready({}, [])
        self._busy = False

    def __enter__(self) -> Self:
        self._busy = True
        try:
            for name, target in self._job.targets.items():
                if target.emulated_bytes_per_s is not None:
                    self._rates[name] = make_shared()
            for rank in sorted(set(self._ranks)):
                self._start(rank)
            answers = self._gather(Ready, lambda count: None, time.monotonic() + START_S)
            self._ready = next(answer for answer in answers if isinstance(answer, Ready))
            self._busy = False
        finally:
            if self._busy:  # refused, or interrupted half way
                self.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process: in order when it waits for us, at once when it is at work."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if self._busy:
                process.kill()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for descriptor in self._rates.values():
            os.close(descriptor)
        self._processes, self._connections, self._rates = [], [], {}

    def devices(self, name: str) -> tuple[str, list[str]]:
        """See `Readers`."""
        return self._ready.devices[name]

    def sliced(self, concurrency: int) -> bool:
        """See `Readers`."""
        return self._job.requests(concurrency) in self._ready.sliced

    def wave(self, name: str, concurrency: int, advance: Callable[[float], None]) -> WaveReading:
        """See `Readers`. All ranks begin at one moment, when the last of them is ready."""
        clients = None if self._job.shape == "wave" else schedule(self._job, concurrency)
        last_s = max(ask.delay_s for client in clients for ask in client) if clients else 0.0
        count_bytes = self._job.requests(concurrency) * self._sessions.bytes_per_session
        limit_s = last_s + GRACE_S + RELEASE_S + count_bytes / SLOWEST_BYTES_PER_S
        number = self._pools[name].device_number
        self._busy = True
        self._tell(Order(name, concurrency, clients))
        self._gather(Prepared, advance, time.monotonic() + START_S)
        before = take_snapshot(number)
        self._tell(Begin(time.monotonic()))
        found = self._gather(RankWave, advance, time.monotonic() + limit_s)
        counted = take_snapshot(number).since(before)
        self._busy = False
        return merged([answer for answer in found if isinstance(answer, RankWave)], counted)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from rewarm.bench.rank import main; main({theirs.fileno()})"
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self._rates.values()),
                start_new_session=True,  # Ctrl-C is for us: we end them
            )
        self._processes.append(process)
        connection = Connection(ours.detach())
        self._connections.append(connection)
        connection.send_bytes(msgspec.json.encode(self._task(rank)))

    def _task(self, rank: int) -> Task:
        mine = of_rank(self._sessions, self._ranks, rank)
        return Task(
            parent=os.getpid(),
            seed=mine.seed,
            count=mine.count,
            lengths=mine.lengths,
            stride=mine.stride,
            places=mine.places,
            block_bytes_max=max(self._sessions.lengths),
            requests_max=self._job.requests(max(self._job.concurrency)),
            budget_bytes=self._budget_bytes,
            targets={
                name: RankTarget(
                    url=self._pools[name].url,
                    order=target.order,
                    emulated_bytes_per_s=target.emulated_bytes_per_s,
                    rate_descriptor=self._rates.get(name, -1),
                )
                for name, target in self._job.targets.items()
            },
        )

    def _tell(self, message: Order | Begin) -> None:
        for connection in self._connections:
            connection.send_bytes(msgspec.json.encode(message))

    def _gather(
        self, kind: type[Ready] | type[Prepared] | type[RankWave], advance: Callable[[float], None], deadline: float
    ) -> Sequence[Answer]:
        """One answer of a kind from every rank. Raises what a rank raised, and `StorageError` when one is silent."""
        missing: list[Connection] = list(self._connections)
        found: list[Answer] = []
        while missing:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise StorageError(f"{len(missing)} rank processes do not answer; the medium hangs, or memory is short")
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = self._answer(connection)
                if isinstance(answer, Moved):
                    advance(answer.count)
                elif isinstance(answer, kind):
                    missing.remove(connection)
                    found.append(answer)
        return found

    def _answer(self, connection: Connection) -> Answer:
        try:
            answer: Answer = _ANSWERS.decode(connection.recv_bytes())
        except (EOFError, OSError):
            raise StorageError("a rank process ended in the middle of its work; what it said is above") from None
        if isinstance(answer, Failed):
            raise ConfigError(answer.message) if answer.usage else StorageError(answer.message)
        return answer


def merged(waves: Sequence[RankWave], counted: Snapshot) -> WaveReading:
    """One reading of all ranks: a request ends with the last of them. `counted` is the device's and the clock's."""
    restores = []
    for parts in zip(*(wave.restores for wave in waves), strict=True):
        outcomes: Counter[Outcome] = Counter()
        for part in parts:
            outcomes.update({Outcome(name): count for name, count in part.outcomes.items()})
        firsts = [part.first_byte_s for part in parts if part.first_byte_s is not None]
        restores.append(
            Restore(
                session=parts[0].session,
                keys=[],
                numbers=(),
                outcomes=outcomes,
                hit_bytes=sum(part.hit_bytes for part in parts),
                wrong_blocks=sum(part.wrong_blocks for part in parts),
                intended_s=parts[0].intended_s,
                submitted_s=max(part.submitted_s for part in parts),
                first_byte_s=min(firsts, default=None),
                last_byte_s=max(part.last_byte_s for part in parts),
            )
        )
    return WaveReading(
        restores=restores,
        seconds=max(wave.seconds for wave in waves),
        counted=msgspec.structs.replace(
            counted,
            process_read_bytes=_sum([wave.counted.process_read_bytes for wave in waves]),
            process_write_bytes=_sum([wave.counted.process_write_bytes for wave in waves]),
            cpu_s=sum(wave.counted.cpu_s for wave in waves),
        ),
        client_cpu_s=max(wave.client_cpu_s for wave in waves),
        whole=all(wave.whole for wave in waves),
        padding_bytes=sum(wave.padding_bytes for wave in waves),
        log_bytes=sum(wave.log_bytes for wave in waves),
        device=", ".join(dict.fromkeys(wave.device for wave in waves)),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum; None as soon as one rank's kernel counter could not be read."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
