"""Runs a job against its targets: fill, make cold, measure the ceiling, restore wave by wave, and judge every number.

Targets are interleaved: every concurrency is run on target after target before the next one, and the whole round is
repeated, so that what drifts on the machine hits all of them alike. Everything that a run writes is gone when
`run_job` returns or raises, an interruption included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec

from rewarm.bench.booking import book_wave
from rewarm.bench.ceiling import PATTERNS, CeilingReading, Pattern, best, measure_ceiling
from rewarm.bench.cold import working_set_note
from rewarm.bench.destination import MEMORY_SHARE, available_memory
from rewarm.bench.host import host_facts, package_version
from rewarm.bench.interference import writing
from rewarm.bench.payload import Payload
from rewarm.bench.pools import Pool, open_pool
from rewarm.bench.populate import populate
from rewarm.bench.ranks import RankReaders
from rewarm.bench.readers import LocalReaders, Readers
from rewarm.bench.recompute import Prefiller
from rewarm.bench.result import SCHEMA, Ceiling, Cell, Result
from rewarm.bench.stages import Stages
from rewarm.bench.summary import differences, summarise, verdicts
from rewarm.bench.wave import WaveReading
from rewarm.geometry.presets import load_model
from rewarm.store.contract import Store
from rewarm.units import format_rate
from rewarm.workload.job import Job
from rewarm.workload.sessions import Sessions, block_lengths, block_ranks

WRITTEN_SHARE = 0.9
"""Writes beside a cell that reach less than this share of their rate are worth a note."""
RATE_MARGIN = 1.05
"""An emulated rate needs a medium at least this much faster."""


@dataclass
class _Run:
    """What the parts of one run share."""

    job: Job
    sessions: Sessions
    restored_tokens: int
    payload: Payload
    prefiller: Prefiller
    pools: dict[str, Pool]
    notes: list[str]
    patterns: dict[str, Pattern] = field(default_factory=dict)
    ceilings: list[Ceiling] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)


def run_job(
    job: Job,
    stages: Stages,
    tell: Callable[[str], None],
    *,
    seconds_max: float = float("inf"),
    opened: Callable[[str, Store], None] = lambda name, store: None,
) -> Result:
    """Run a job; `tell` hears what is removed at the end. No further repeat begins after `seconds_max`.

    `opened` gets every store of the run with its target's label when it is there, for example to watch its counters.

    Raises `ConfigError` for what cannot be run and `StorageError` when a medium fails. Misses, wrong bytes and reads
    that were not cold do not raise: they are in `Result.failures`.
    """
    started_s = time.monotonic()
    model = load_model(job.model)
    lengths = block_lengths(model, job.tokens, job.block_tokens, job.tp, job.kv_dtype)
    sessions = Sessions(job.seed, job.session_count, tuple(lengths))
    notes: list[str] = []
    budget = int(available_memory() * MEMORY_SHARE)
    with ExitStack() as stack:
        pools = _open_pools(stack, job, sessions, tell)
        run = _Run(
            job=job,
            sessions=sessions,
            restored_tokens=job.tokens // job.block_tokens * job.block_tokens,
            payload=Payload(job.seed, max(lengths)),
            prefiller=Prefiller.of(model, job),
            pools=pools,
            notes=notes,
        )
        notes += _cold_notes(run)
        local = _local_readers(run, budget)
        _fill(run, stages, opened)
        readers = _readers(run, local, stack, opened, budget)
        notes += _slice_notes(job, readers)
        notes += [_device_note(_label(job, name), *readers.devices(name)) for name in job.targets]
        for repeat in range(job.repeats):
            if repeat and time.monotonic() - started_s > seconds_max:
                notes.append(f"{repeat} of {job.repeats} repeats, the others would have taken too long")
                break
            _round(run, readers, repeat, stages)
    return _result(run)


def _local_readers(run: _Run, budget: int) -> LocalReaders | None:
    """This process as the reader of all ranks: where there is one only, or a store that no other process can see."""
    several = len(set(_block_ranks(run.job))) > 1
    seen = all(pool.seen_by_all for pool in run.pools.values())
    if several and seen and run.job.shape != "closed":
        return None
    if several and seen:
        run.notes.append("a closed client waits for all ranks, so one process restores the blocks of all ranks")
    elif several:
        run.notes.append("memory: is seen by this process alone, so it restores the blocks of all ranks")
    return LocalReaders(run.job, run.pools, run.sessions, run.payload, budget)


def _readers(
    run: _Run, local: LocalReaders | None, stack: ExitStack, opened: Callable[[str, Store], None], budget: int
) -> Readers:
    """The filled targets, open for reading, until `stack` closes."""
    if local is not None:
        local.open(stack, lambda name, store: opened(_label(run.job, name), store))
        return local
    ranks = _block_ranks(run.job)
    run.notes.append(f"{len(set(ranks))} processes, one for each rank; their counters are added up")
    return stack.enter_context(RankReaders(run.job, run.pools, run.sessions, ranks, budget))


def _block_ranks(job: Job) -> list[int]:
    return block_ranks(load_model(job.model), job.tokens, job.block_tokens, job.tp, job.kv_dtype)


def _open_pools(stack: ExitStack, job: Job, sessions: Sessions, tell: Callable[[str], None]) -> dict[str, Pool]:
    """The pool of each target; targets with one URL share one."""
    by_url: dict[str, Pool] = {}
    for name, target in job.targets.items():
        if target.url not in by_url:
            by_url[target.url] = open_pool(stack, name, target, sessions.bytes_total, tell)
    return {name: by_url[target.url] for name, target in job.targets.items()}


def _cold_notes(run: _Run) -> list[str]:
    """What stands for or against cold reads before the first one."""
    reasons = {pool.counting.reason for pool in run.pools.values()}
    notes = [f"cold reads are not provable: {reason}" for reason in sorted(filter(None, reasons))]
    if None in reasons:
        notes.append(working_set_note(max(run.job.concurrency) * run.sessions.bytes_per_session))
    behind = {pool.medium.backing for pool in run.pools.values() if pool.medium and pool.medium.backing}
    notes += [f"behind the loop device is {path}: its reads may come from memory" for path in sorted(behind)]
    return notes


def _slice_notes(job: Job, readers: Readers) -> list[str]:
    """Waves that do not fit into memory: their requests share the medium, so the median comes near the last."""
    sliced = [str(n) for n in job.concurrency if readers.sliced(n)]
    if not sliced:
        return []
    return [f"memory holds no whole wave of {', '.join(sliced)}: restored in slices, so its requests end together"]


def _fill(run: _Run, stages: Stages, opened: Callable[[str, Store], None]) -> None:
    first_names = {pool.url: name for name, pool in reversed(run.pools.items())}
    for name in reversed(first_names.values()):
        pool = run.pools[name]
        with (
            stages(f"filling {_label(run.job, name)}", run.sessions.bytes_total) as progress,
            pool.writer() as store,
        ):
            opened(f"{_label(run.job, name)}, filling", store)
            populate(store, run.sessions, run.payload, progress.advance)
        pool.make_cold()


def _round(run: _Run, readers: Readers, repeat: int, stages: Stages) -> None:
    """One repeat: the ceiling of every pool, then every wave on every target."""
    job = run.job
    _measure_ceilings(run, repeat)
    for concurrency in job.concurrency:
        for name in job.targets:
            count, folder = job.requests(concurrency), run.pools[name].folder
            label = f"repeat {repeat + 1} of {job.repeats}: {count} restores from {_label(job, name)}"
            with stages(label, count * run.sessions.bytes_per_session) as progress:
                run.pools[name].make_cold()
                with writing(folder and folder.parent, job.write_bytes_per_s) as written:
                    reading = readers.wave(name, concurrency, progress.advance)
                run.cells.append(_book(run, name, concurrency, repeat, reading))
            if written.bytes_per_s < job.write_bytes_per_s * WRITTEN_SHARE:
                run.notes.append(
                    f"{_label(job, name)} at {concurrency}, repeat {repeat + 1}: the medium took only "
                    f"{format_rate(written.bytes_per_s)} of the writes beside the restores"
                )


def _measure_ceilings(run: _Run, repeat: int) -> None:
    """The raw ceiling of every pool: all patterns at first, the best one again in each later repeat."""
    measured: dict[str, list[CeilingReading]] = {}
    for name, pool in run.pools.items():
        if pool.url not in measured:
            known = run.patterns.get(pool.url)
            patterns = PATTERNS if known is None else (known,)
            measured[pool.url] = measure_ceiling(
                pool.segments(), patterns, start=repeat / run.job.repeats, ranges=pool.ranges()
            )
        found = best(measured[pool.url])
        if found is not None:
            run.patterns[pool.url] = run.patterns.get(pool.url, found.pattern)
            _book_ceiling(run, name, repeat, measured[pool.url], found.bytes_per_s)


def _book_ceiling(run: _Run, name: str, repeat: int, readings: list[CeilingReading], top: float) -> None:
    rate = run.job.targets[name].emulated_bytes_per_s
    if rate is not None and top < rate * RATE_MARGIN:
        run.notes.append(
            f"{_label(run.job, name)} at {format_rate(rate)}, but in repeat {repeat} the medium itself gave only "
            f"{format_rate(top)}: those readings are the medium's"
        )
    run.ceilings += [
        Ceiling(
            target=name,
            emulated=rate is not None,
            repeat=repeat,
            block_bytes=reading.pattern.block_bytes,
            in_flight_bytes=reading.pattern.in_flight_bytes,
            read_bytes_per_s=reading.bytes_per_s if rate is None else min(reading.bytes_per_s, rate),
            cpu_s_per_gb=reading.cpu_s_per_gb,
        )
        for reading in readings
    ]


def _label(job: Job, name: str) -> str:
    """A target's name; an emulated medium is never named without saying so."""
    return name if job.targets[name].emulated_bytes_per_s is None else f"{name} (emulated)"


def _book(run: _Run, name: str, concurrency: int, repeat: int, wave: WaveReading) -> Cell:
    job = run.job
    return book_wave(
        job,
        name,
        repeat,
        wave,
        concurrency=concurrency,
        pool=run.pools[name],
        lengths=run.sessions.lengths,
        prefiller=run.prefiller,
    )


def _with_share(run: _Run, cell: Cell) -> Cell:
    """The cell beside the best ceiling of the run: what the medium was seen to do at any time, so nothing flatters."""
    mine = [ceiling.read_bytes_per_s for ceiling in run.ceilings if ceiling.target == cell.target]
    if not mine or cell.read_bytes_per_s is None:
        return cell
    return msgspec.structs.replace(cell, ceiling_share=cell.read_bytes_per_s / max(mine))


def _result(run: _Run) -> Result:
    job = run.job
    cells = [_with_share(run, cell) for cell in run.cells]
    summary = summarise(cells)
    return Result(
        schema=SCHEMA,
        version=package_version(),
        host=host_facts(),
        seed=job.seed,
        job=msgspec.to_builtins(job),
        sizes={
            "restored_tokens": run.restored_tokens,
            "bytes_per_session": run.sessions.bytes_per_session,
            "blocks_per_session": len(run.sessions.lengths),
            "block_bytes_max": max(run.sessions.lengths),
            "sessions": run.sessions.count,
        },
        media={name: msgspec.to_builtins(pool.medium) for name, pool in run.pools.items()},
        ceiling=run.ceilings,
        cells=cells,
        summary=summary,
        differences=differences(summary),
        verdicts=verdicts(summary),
        notes=run.notes,
    )


def _device_note(label: str, device: str, refusals: list[str]) -> str:
    refused = f"; not used: {'; '.join(refusals)}" if refusals else ""
    return f"{label}: read through {device}{refused}"
