"""The same job on every node of a Ray cluster at once, over shared mounts: what many hosts get of one pool.

Ray starts one process per node and carries messages; it moves no data. No clocks are compared: every wave begins when
all nodes have said that they are ready. Needs the extra `ray` and Rewarm on every node.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rewarm.bench.ceiling import CeilingReading
from rewarm.bench.host import host_facts, package_version
from rewarm.bench.hosts_node import Node, merge
from rewarm.bench.medium import medium_of
from rewarm.bench.pools import needed_bytes
from rewarm.bench.result import SCHEMA, Ceiling, Cell, Result
from rewarm.bench.scratch import Scratch
from rewarm.bench.stages import Stages
from rewarm.bench.summary import differences, summarise, verdicts
from rewarm.errors import ConfigError, StorageError
from rewarm.geometry.presets import load_model
from rewarm.store.opening import parse_url
from rewarm.workload.job import Job
from rewarm.workload.sessions import block_lengths

CONNECT_S = 5.0
NODE_S = 3600.0
"""How long a node may take for one step; a lost one is noticed by Ray much earlier."""


def run_on_hosts(
    job: Job, stages: Stages, tell: Callable[[str], None], *, address: str | None = None, cross: bool = False
) -> Result:
    """Run a job of `wave` shape on every node; each fills `sessions` of its own and restores `concurrency` at once.

    `cross`: every node restores what the next one stored. `address` is that of the cluster; None finds the one that
    runs here. Raises `ConfigError` for what cannot be run on several hosts, `StorageError` when a node fails.
    """
    if job.servers or job.shape != "wave":
        raise ConfigError("several hosts restore waves from targets; servers and other shapes are measured from one")
    lengths = block_lengths(load_model(job.model), job.tokens, job.block_tokens, job.tp, job.kv_dtype)
    with ExitStack() as stack:
        ids = stack.enter_context(_cluster(address))
        if cross and len(ids) < 2:
            raise ConfigError(f"cross-instance reads need two nodes or more; the cluster has {len(ids)}")
        places = _places(stack, job, sum(lengths) * job.session_count * len(ids), tell)
        nodes = stack.enter_context(_nodes(job, ids, places, tell))
        return _Hosts(job, stages, nodes, places, lengths, cross).run()


@contextmanager
def _cluster(address: str | None) -> Iterator[list[str]]:
    """Connect to a cluster; the ids of its living nodes. Raises `ConfigError` when there is none."""
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address or "auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, TimeoutError, socket.gaierror) as error:
        raise ConfigError(f"no Ray cluster at {address or 'this host'}: {error}; start one with `ray start`") from error
    try:
        yield sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def _places(stack: ExitStack, job: Job, payload_bytes: int, tell: Callable[[str], None]) -> dict[str, tuple[str, str]]:
    """A fresh pool for each URL on its shared mount: target -> its URL and folder. Gone when `stack` closes."""
    made: dict[str, tuple[str, str]] = {}
    for target in job.targets.values():
        location = parse_url(target.url)
        if location.scheme != "file":
            raise ConfigError(f"{target.url!r} is not on a mount that several hosts share; give file: URLs")
        if target.url not in made:
            folder = stack.enter_context(Scratch(Path(location.path), tell)).path / "pool"
            folder.mkdir()
            options = {"capacity": str(needed_bytes(payload_bytes)), **location.options}
            made[target.url] = (f"file://{quote(str(folder))}?{urlencode(options)}", str(folder))
    return {name: made[target.url] for name, target in job.targets.items()}


@contextmanager
def _nodes(
    job: Job, ids: Sequence[str], places: dict[str, tuple[str, str]], tell: Callable[[str], None]
) -> Iterator[list[Any]]:
    """One process on each node, ended with the block."""
    barrier = ray.remote(_Barrier).options(num_cpus=0, max_concurrency=len(ids) + 1).remote(len(ids))
    nodes: list[Any] = []
    try:
        for number, identity in enumerate(ids):
            where = NodeAffinitySchedulingStrategy(identity, soft=False)
            made = ray.remote(_Remote).options(num_cpus=0, scheduling_strategy=where)
            nodes.append(made.remote(msgspec.json.encode(job), number, places, len(ids), barrier))
        yield nodes
    finally:
        for actor in (*nodes, barrier):
            ray.kill(actor)
        tell(f"ended {len(nodes)} processes on {len(ids)} nodes")


class _Barrier:
    """Lets callers go when all have come."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._here = 0
        self._gate = asyncio.Event()

    async def wait(self) -> None:
        """Return when `count` have called."""
        gate = self._gate
        self._here += 1
        if self._here == self._count:
            self._here, self._gate = 0, asyncio.Event()
            gate.set()
        await gate.wait()


class _Remote:
    """A node as Ray runs it: plain bytes in and out."""

    def __init__(self, job: bytes, number: int, places: dict[str, tuple[str, str]], count: int, barrier: Any) -> None:
        self._node = Node(msgspec.json.decode(job, type=Job), number, places, count)
        self._barrier = barrier

    def fill(self, name: str) -> int:
        """See `Node.fill`."""
        return self._node.fill(name)

    def open(self) -> str:
        """See `Node.open`."""
        return self._node.open()

    def ceiling(self, name: str) -> bytes:
        """See `Node.ceiling`."""
        return msgspec.json.encode(self._node.ceiling(name, self._begin))

    def wave(self, name: str, concurrency: int, repeat: int, whose: int) -> bytes:
        """See `Node.wave`."""
        return msgspec.json.encode(self._node.wave(name, concurrency, repeat, whose, self._begin))

    def _begin(self) -> float:
        ray.get(self._barrier.wait.remote(), timeout=NODE_S)
        return time.monotonic()


class _Hosts:
    """The run, as the driver sees it."""

    def __init__(
        self,
        job: Job,
        stages: Stages,
        nodes: Sequence[Any],
        places: dict[str, tuple[str, str]],
        lengths: Sequence[int],
        cross: bool,
    ) -> None:
        self.job, self.stages, self.nodes, self.places, self.cross = job, stages, nodes, places, cross
        self.lengths = lengths
        self.ceilings: list[Ceiling] = []

    def run(self) -> Result:
        """Fill, open, measure, judge."""
        job = self.job
        each_bytes = sum(self.lengths) * job.session_count
        for url in dict.fromkeys(self.places.values()):
            name = next(name for name, place in self.places.items() if place == url)
            with self.stages(f"filling {name} from {len(self.nodes)} nodes", each_bytes * len(self.nodes)) as progress:
                for done in self._all("fill", name):
                    progress.advance(done)
        names = self._all("open")
        for name in job.targets:
            self._measure_ceiling(name)
        cells = [
            self._cell(name, concurrency, repeat)
            for repeat in range(job.repeats)
            for concurrency in job.concurrency
            for name in job.targets
        ]
        return self._result(cells, names)

    def _measure_ceiling(self, name: str) -> None:
        with self.stages(f"raw reads of {name} from {len(self.nodes)} nodes", 0):
            raw = self._all("ceiling", name)
        found = [msgspec.json.decode(each, type=CeilingReading | None) for each in raw]
        readings = [reading for reading in found if reading is not None]
        if len(readings) < len(self.nodes):
            return
        total, rate = sum(reading.bytes_per_s for reading in readings), self.job.targets[name].emulated_bytes_per_s
        self.ceilings.append(
            Ceiling(
                target=name,
                emulated=rate is not None,
                repeat=0,
                block_bytes=readings[0].pattern.block_bytes,
                in_flight_bytes=sum(reading.pattern.in_flight_bytes for reading in readings),
                read_bytes_per_s=total if rate is None else min(total, rate * len(readings)),
                cpu_s_per_gb=sum(reading.cpu_s_per_gb * reading.bytes_per_s for reading in readings) / total,
            )
        )

    def _cell(self, name: str, concurrency: int, repeat: int) -> Cell:
        count, bytes_each = len(self.nodes), sum(self.lengths)
        label = (
            f"repeat {repeat + 1} of {self.job.repeats}: {concurrency} restores on each of {count} nodes from {name}"
        )
        with self.stages(label, concurrency * count * bytes_each) as progress:
            running = [
                node.wave.remote(name, concurrency, repeat, (number + self.cross) % count)
                for number, node in enumerate(self.nodes)
            ]
            cell = merge([msgspec.json.decode(found, type=Cell) for found in _got(running)])
            progress.advance(concurrency * count * bytes_each)
        top = max((c.read_bytes_per_s for c in self.ceilings if c.target == name), default=None)
        if top is None or cell.read_bytes_per_s is None:
            return cell
        return msgspec.structs.replace(cell, ceiling_share=cell.read_bytes_per_s / top)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Have every node do something at the same time."""
        return _got([getattr(node, method).remote(*arguments) for node in self.nodes])

    def _result(self, cells: list[Cell], names: Sequence[str]) -> Result:
        job, summary = self.job, summarise(cells)
        whose = "what the next node stored" if self.cross else "what it stored itself"
        return Result(
            schema=SCHEMA,
            version=package_version(),
            host=host_facts(),
            seed=job.seed,
            job=msgspec.to_builtins(job),
            sizes={
                "restored_tokens": job.tokens // job.block_tokens * job.block_tokens,
                "bytes_per_session": sum(self.lengths),
                "blocks_per_session": len(self.lengths),
                "block_bytes_max": max(self.lengths),
                "sessions": job.session_count * len(names),
            },
            media={
                name: msgspec.to_builtins(medium_of(Path(parse_url(target.url).path)))
                for name, target in job.targets.items()
            },
            ceiling=self.ceilings,
            cells=cells,
            summary=summary,
            differences=differences(summary),
            verdicts=verdicts(summary),
            notes=[
                f"{len(names)} nodes at once ({', '.join(sorted(set(names)))}), each restores {whose}; a cell has the "
                "requests of all of them, and the ceiling is the sum of raw reads that ran at the same time"
            ],
        )


def _got(running: Sequence[Any]) -> list[Any]:
    """What the nodes bring home. Raises `StorageError` when one failed, `ConfigError` when it was our doing."""
    try:
        return ray.get(list(running), timeout=NODE_S)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (ConfigError, StorageError)):
            raise cause from error
        raise StorageError(f"a node failed: {cause!r}") from error
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise StorageError(f"a node was lost: {error}") from error
