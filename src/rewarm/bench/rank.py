"""One rank of an engine as a process of its own: restores its blocks when it is told to, and says what that took.

`main` is started by `ranks` with a socket. It opens every target, answers `Ready`, and then runs a wave for each
`Order` until the socket closes. It dies with its parent. The messages of both sides are defined here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import msgspec

from rewarm.bench.cold import kept_resident
from rewarm.bench.counters import Snapshot
from rewarm.bench.destination import Destinations
from rewarm.bench.payload import Payload
from rewarm.bench.pools import open_reader
from rewarm.bench.throttle import RateLimit
from rewarm.bench.wave import Wave, WaveReading, warm_up
from rewarm.errors import ConfigError, RewarmError
from rewarm.store.contract import Store
from rewarm.workload.sessions import RankSessions
from rewarm.workload.shapes import Ask

_PR_SET_PDEATHSIG = 1


class RankTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target to read. `rate_descriptor` is the clock that all ranks share of an emulated medium."""

    url: str
    order: str
    emulated_bytes_per_s: float | None
    rate_descriptor: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is, told once."""

    parent: int
    seed: int
    count: int
    lengths: tuple[int, ...]
    stride: int
    places: tuple[int, ...]
    block_bytes_max: int
    requests_max: int
    budget_bytes: int
    targets: dict[str, RankTarget]


class Order(msgspec.Struct, frozen=True, tag=True):
    """Prepare a wave, or the requests of `clients`; it begins with `Begin`."""

    target: str
    concurrency: int
    clients: list[tuple[Ask, ...]] | None


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The intended start, on the monotonic clock that all processes of a machine share."""

    start: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Everything is open; for each target the device that reads it and why not another."""

    devices: dict[str, tuple[str, list[str]]]
    sliced: list[int]


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The wave can begin."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Bytes that have come back."""

    count: float


class RankRestore(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's share of one request, see `wave.Restore`."""

    session: int
    outcomes: dict[str, int]
    hit_bytes: int
    wrong_blocks: int
    intended_s: float
    submitted_s: float
    first_byte_s: float | None
    last_byte_s: float


class RankWave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A rank's share of one wave, see `wave.WaveReading`."""

    restores: list[RankRestore]
    seconds: float
    counted: Snapshot
    client_cpu_s: float
    whole: bool
    padding_bytes: int
    log_bytes: int
    device: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot go on; `usage` tells a `ConfigError` from a `StorageError`."""

    message: str
    usage: bool


Answer = Ready | Prepared | Moved | RankWave | Failed
_ORDERS = msgspec.json.Decoder(Order | Begin)


def main(descriptor: int) -> None:
    """Serve until the socket closes."""
    connection = Connection(descriptor)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, ConnectionError):  # the run has ended, or was interrupted while we answer
        task = msgspec.json.decode(connection.recv_bytes(), type=Task)
        if os.getppid() != task.parent:
            return  # it went before we could ask to be told
        try:
            with ExitStack() as stack:
                _serve(connection, task, stack)
        except RewarmError as error:
            _send(connection, Failed(str(error), isinstance(error, ConfigError)))


def _serve(connection: Connection, task: Task, stack: ExitStack) -> None:
    sessions = RankSessions(task.seed, task.count, task.lengths, task.stride, task.places)
    payload = Payload(task.seed, task.block_bytes_max)
    destinations = Destinations(task.lengths, task.requests_max, task.budget_bytes)
    stores: dict[str, Store] = {}
    for name, target in task.targets.items():
        rate = target.emulated_bytes_per_s
        limit = RateLimit(rate, shared=target.rate_descriptor) if rate else None
        stores[name] = stack.enter_context(open_reader(target.url, target.order, limit))
    for store in stores.values():
        warm_up(store, sessions, payload)
    stack.enter_context(kept_resident())
    stats = {name: store.stats() for name, store in stores.items()}
    sliced = [n for n in range(1, task.requests_max + 1) if not destinations.region(n).whole]
    _send(connection, Ready({name: (s.device, s.device_refusals) for name, s in stats.items()}, sliced))

    def advance(count: float) -> None:
        _send(connection, Moved(count))

    def begin() -> float:
        _send(connection, Prepared())
        told = _ORDERS.decode(connection.recv_bytes())
        return told.start if isinstance(told, Begin) else time.monotonic()

    while True:
        order = _ORDERS.decode(connection.recv_bytes())
        if isinstance(order, Order):
            together = task.targets[order.target].order == "together"
            store = stores[order.target]
            wave = Wave(
                store, sessions, payload, destinations, order.concurrency, advance, together=together,
                clients=order.clients,
            )  # fmt: skip
            _send(connection, _told(wave.run(None, begin)))


def _told(reading: WaveReading) -> RankWave:
    return RankWave(
        restores=[
            RankRestore(
                session=restore.session,
                outcomes={str(outcome): count for outcome, count in restore.outcomes.items()},
                hit_bytes=restore.hit_bytes,
                wrong_blocks=restore.wrong_blocks,
                intended_s=restore.intended_s,
                submitted_s=restore.submitted_s,
                first_byte_s=restore.first_byte_s,
                last_byte_s=restore.last_byte_s,
            )
            for restore in reading.restores
        ],
        seconds=reading.seconds,
        counted=reading.counted,
        client_cpu_s=reading.client_cpu_s,
        whole=reading.whole,
        padding_bytes=reading.padding_bytes,
        log_bytes=reading.log_bytes,
        device=reading.device,
    )


def _send(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(msgspec.json.encode(answer))
