"""The demo: the main job sized for the machine it runs on, at most 3 GB of disk and about two minutes.

A short trial of the directory says how fast it writes and reads; from that and the free space follows how many tokens
a session gets. The job has three targets on one pool: the medium as it is, then two emulated media whose rates have
the ratio of the published readings of one local NVMe drive and an NVMe-oF array (6.94 : 10.5 GB/s), scaled below what
this medium reached. Everything else is the benchmark's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import msgspec

from rewarm.bench.ceiling import Pattern, best, measure_ceiling
from rewarm.bench.medium import Medium, medium_of
from rewarm.bench.pools import FREE_SHARE, needed_bytes
from rewarm.bench.raw import Extent, make_operations, random_arena, run_raw
from rewarm.bench.recompute import Prefiller
from rewarm.bench.replay import run_job
from rewarm.bench.result import Result
from rewarm.bench.scratch import Scratch
from rewarm.bench.stages import Stages
from rewarm.errors import StorageError
from rewarm.geometry.presets import load_model
from rewarm.geometry.sizes import bytes_per_token
from rewarm.store.devices.base import WRITE
from rewarm.store.devices.medium import MEMORY_FILESYSTEMS, NETWORK_FILESYSTEMS
from rewarm.store.devices.select import choose_device
from rewarm.units import format_rate, format_size
from rewarm.workload.job import Job, Target

MODEL = "Llama-3.1-8B"
GPU = "L4"
"""A GPU that such a model is served on where money is short; what a large one changes is said in a note."""
LARGE_GPU = "H100"
BLOCK_TOKENS = 16
CONCURRENCY = (8, 16, 32)
TOKENS_MAX = 512
BLOCKS_MIN = 2

DISK_BYTES_MAX = 3_000_000_000
SECONDS = 75.0
"""What the plan aims at, so that a medium slower than its trial still ends within two minutes."""
SECONDS_MAX = 85.0
"""No further repeat begins after this."""
REPEATS = 3
TOKENS_GOOD = 128
"""Rather fewer repeats than shorter sessions than this."""

LOCAL_BYTES_PER_S = 6.94e9
ARRAY_BYTES_PER_S = 10.5e9
"""Published peak readings: one PCIe Gen4 NVMe drive; four drives behind one 100 GbE port over RoCEv2."""
EMULATED_SHARE = 0.6
"""The faster emulated medium, as a share of what this one reached in the trial: the emulation needs room above it."""

MIB = 1 << 20
_TRIAL_BYTES = 256 * MIB
_TRIAL_S = 2.0
_TRIAL_PATTERNS = (Pattern(1 * MIB, 16 * MIB), Pattern(1 * MIB, 64 * MIB))
_STORE_SHARE = 0.5
"""What to expect of a store beside the raw trial, on a machine with two busy processors."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a short raw trial of the directory reached."""

    write_bytes_per_s: float
    read_bytes_per_s: float


class DemoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The job that fits this machine, and what had to be made smaller for it."""

    job: Job
    notes: list[str]


def run_demo(directory: Path, stages: Stages, tell: Callable[[str], None]) -> Result:
    """Run the demo in a scratch directory below `directory`; everything written is removed, `tell` hears of it.

    Raises `ConfigError` for a directory that does not exist, `StorageError` when it has too little room or I/O fails.
    """
    medium = medium_of(directory)
    room = disk_room(medium)
    with Scratch(directory, tell) as scratch, stages("trying the medium", 2 * _TRIAL_BYTES) as progress:
        trial = _try(scratch.path, min(_TRIAL_BYTES, room // 4 // MIB * MIB), progress.advance)
    plan = plan_demo(medium, room, trial)
    result = run_job(plan.job, stages, tell, seconds_max=SECONDS_MAX)
    return msgspec.structs.replace(result, notes=[*plan.notes, *result.notes, _large_gpu_note(plan.job)])


def disk_room(medium: Medium) -> int:
    """Bytes that the demo may take. Raises `StorageError` when that is less than the smallest demo needs."""
    room = min(DISK_BYTES_MAX, int(medium.free_bytes - FREE_SHARE * medium.size_bytes))
    least = needed_bytes(max(CONCURRENCY) * BLOCKS_MIN * BLOCK_TOKENS * _token_bytes())
    if room < least:
        raise StorageError(
            f"{medium.path} has {format_size(max(0, room))} to give and the smallest demo needs {format_size(least)}; "
            "free some space, or give another directory with --dir"
        )
    return room


def plan_demo(medium: Medium, room: int, trial: Trial) -> DemoPlan:
    """Choose tokens, repeats and emulated rates. Pure."""
    array = EMULATED_SHARE * trial.read_bytes_per_s
    local = array * LOCAL_BYTES_PER_S / ARRAY_BYTES_PER_S
    fits = _tokens_that_fit(room)
    repeats, tokens = REPEATS, 0
    for repeats in range(REPEATS, 0, -1):
        tokens = min(TOKENS_MAX, fits, _tokens_in_time(trial, (array, local), repeats))
        if tokens >= min(TOKENS_GOOD, fits):
            break
    tokens = max(tokens, BLOCKS_MIN * BLOCK_TOKENS)
    url = f"file://{quote(os.path.abspath(medium.path))}"
    job = Job(
        model=MODEL,
        tokens=tokens,
        block_tokens=BLOCK_TOKENS,
        concurrency=CONCURRENCY,
        gpu=GPU,
        repeats=repeats,
        targets={
            _name(medium): Target(url=url),
            "local": Target(url=url, emulated_bytes_per_s=local),
            "array": Target(url=url, emulated_bytes_per_s=array),
        },
    )
    return DemoPlan(job=job, notes=_plan_notes(job, room, fits, trial, medium))


def _token_bytes() -> int:
    return bytes_per_token(load_model(MODEL))


def _tokens_that_fit(room: int) -> int:
    """Tokens a session for which the pool and all it needs beside it take no more than `room`."""
    whole = _whole_blocks(room / max(CONCURRENCY) / _token_bytes())
    while needed_bytes(max(CONCURRENCY) * whole * _token_bytes()) > room:
        whole -= BLOCK_TOKENS
    return whole


def _tokens_in_time(trial: Trial, rates: tuple[float, ...], repeats: int) -> int:
    """Tokens a session with which filling and all waves end in time: bytes of all waves over each medium's rate."""
    fill_s = max(CONCURRENCY) / (_STORE_SHARE * trial.write_bytes_per_s)
    read_s = 1 / (_STORE_SHARE * trial.read_bytes_per_s) + sum(1 / rate for rate in rates)
    return _whole_blocks(SECONDS / (fill_s + repeats * sum(CONCURRENCY) * read_s) / _token_bytes())


def _whole_blocks(tokens: float) -> int:
    return int(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _name(medium: Medium) -> str:
    """What to call the medium as it is: only what may be flash is called so."""
    kind = medium.file_system
    other = kind in MEMORY_FILESYSTEMS or kind in NETWORK_FILESYSTEMS or kind.startswith("fuse.")
    return kind if other else "flash"


def _plan_notes(job: Job, room: int, fits: int, trial: Trial, medium: Medium) -> list[str]:
    notes = [
        f"local and array are emulated on this one medium, in the ratio of published readings "
        f"({LOCAL_BYTES_PER_S / 1e9:g} : {ARRAY_BYTES_PER_S / 1e9:g} GB/s): real reads, their completions held back"
    ]
    if fits < TOKENS_MAX:
        notes.append(f"sessions were made shorter: {medium.path} has {format_size(room)} to give")
    if job.tokens < min(fits, TOKENS_MAX) or job.repeats < REPEATS:
        notes.append(
            f"sessions of {job.tokens} tokens and {job.repeats} repeats, to end in two minutes: the trial wrote "
            f"{format_rate(trial.write_bytes_per_s)} and read {format_rate(trial.read_bytes_per_s)}"
        )
    return notes


def _large_gpu_note(job: Job) -> str:
    """From which bandwidth restoring pays on a large GPU as well."""
    model = load_model(job.model)
    seconds = Prefiller.of(model, msgspec.structs.replace(job, gpu=LARGE_GPU)).seconds(job.tokens)
    if seconds is None:
        return f"prefill of {job.model} cannot be modelled"
    needed = job.tokens * bytes_per_token(model) / seconds
    return f"on 1 x {LARGE_GPU} (modelled) restoring this model pays above {format_rate(needed)}"


def _try(folder: Path, size: int, advance: Callable[[float], None]) -> Trial:
    """Write a file of at most `size` bytes, as much as the time allows, and read it back past the page cache."""
    path = folder / "trial"
    path.touch(mode=0o600)
    choice = choose_device(folder)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if choice.direct else 0))
    device = choice.open()
    try:
        operations = make_operations([Extent(descriptor, size)], WRITE, MIB, None)
        written = run_raw(device, operations, random_arena(16 * MIB, seed=0), 16, _TRIAL_S)
        os.fsync(descriptor)
    finally:
        device.close()
        os.close(descriptor)
    advance(_TRIAL_BYTES)
    read = best(measure_ceiling([path], _TRIAL_PATTERNS))
    advance(_TRIAL_BYTES)
    if read is None:
        raise StorageError(
            f"{folder} took only {format_size(written.bytes_moved)} in {_TRIAL_S:.0f} s; too slow to try"
        )
    return Trial(write_bytes_per_s=written.bytes_per_s, read_bytes_per_s=read.bytes_per_s)
