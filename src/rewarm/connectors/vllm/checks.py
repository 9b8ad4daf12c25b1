"""Tries everything that a start of vLLM over a store depends on, and says of each part what to do where it fails.

Reads and writes a nameless file in the store's directory; makes no pool, starts no engine, removes nothing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from rewarm.connectors.checking import Check, attempt
from rewarm.connectors.places import try_directories, try_pools
from rewarm.connectors.vllm.launch import HASH_ALGORITHM
from rewarm.connectors.vllm.versions import interface
from rewarm.errors import ConfigError
from rewarm.geometry.presets import load_model
from rewarm.geometry.sizes import bytes_total
from rewarm.units import format_size

SHARED_MEMORY = Path("/dev/shm")
REGION_FILES = "vllm_offload_*.mmap"
"""Where vLLM puts the region of an engine; one that was killed leaves its file, and the memory, behind."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started. `concurrency` requests of `tokens` each are in flight at one time."""

    url: str
    staging_bytes: int
    model: str | None
    tokens: int | None
    concurrency: int


def run_checks(plan: Plan, shared_memory: Path = SHARED_MEMORY) -> Iterator[Check]:
    """Try the parts one after the other; a part that cannot be tried is one that failed."""
    parts: list[tuple[str, Callable[[], str]]] = [
        ("engine", _engine),
        ("interface", _signatures),
        ("hash seed", _hash_seed),
        ("directory", lambda: try_directories(plan.url)),
        ("pool", lambda: try_pools(plan.url)),
        ("staging", lambda: _staging(plan)),
        ("shared memory", lambda: _room(shared_memory, plan.staging_bytes)),
        ("stale regions", lambda: _stale(shared_memory)),
    ]
    yield from attempt(parts)


def _engine() -> str:
    return f"vLLM {interface().version}"


def _signatures() -> str:
    """The classes can be made from this vLLM, and leave none of its abstract methods open."""
    package = importlib.import_module("rewarm.connectors.vllm")
    for name in ("RewarmTier", "RewarmConnector"):
        missing = sorted(getattr(getattr(package, name), "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{name} lacks {', '.join(missing)}: this vLLM asks for more than Rewarm knows")
    return "RewarmTier and RewarmConnector fit"


def _hash_seed() -> str:
    if interface().seed_changes_with_process(HASH_ALGORITHM):
        raise ConfigError(f"block hashes of {HASH_ALGORITHM} change with the process: set PYTHONHASHSEED everywhere")
    return f"{HASH_ALGORITHM} gives the same keys in every process"


def _staging(plan: Plan) -> str:
    """vLLM's region must hold the KV of the requests in flight, else restores are cut short."""
    if plan.model is None:
        return f"{format_size(plan.staging_bytes)}; give --model to have it compared with what requests need"
    model = load_model(plan.model)
    tokens = plan.tokens or model.context_tokens
    if tokens is None:
        raise ConfigError(f"{plan.model} names no longest context; give --tokens")
    need = bytes_total(model, tokens) * plan.concurrency
    text = f"{plan.concurrency} requests of {tokens} tokens are {format_size(need)}"
    if need > plan.staging_bytes:
        raise ConfigError(f"{text}, more than the staging of {format_size(plan.staging_bytes)}: give --staging {need}")
    return f"{text}, staging {format_size(plan.staging_bytes)}"


def _room(shared_memory: Path, staging_bytes: int) -> str:
    found = os.statvfs(shared_memory)
    free = found.f_bavail * found.f_frsize
    if free < staging_bytes:
        raise ConfigError(
            f"{shared_memory} has {format_size(free)} free, the staging takes {format_size(staging_bytes)}: enlarge it "
            "(in containers: --shm-size, or an emptyDir of medium Memory), or give a smaller --staging"
        )
    return f"{format_size(free)} free in {shared_memory}"


def _stale(shared_memory: Path) -> str:
    regions = sorted(shared_memory.glob(REGION_FILES))
    if not regions:
        return "none"
    mapped = _mapped_files()
    stale = [path for path in regions if str(path) not in mapped]
    if stale:
        names = ", ".join(f"{path} ({format_size(path.stat().st_size)})" for path in stale)
        raise ConfigError(f"no process of ours uses {names}: left by an engine that was killed; remove them")
    return f"none; {len(regions)} in use"


def _mapped_files() -> set[str]:
    """Region files that processes we may look at have mapped."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue  # the process has ended, or belongs to another user
        found.update(line.rpartition(" ")[2] for line in lines if "vllm_offload_" in line)
    return found
