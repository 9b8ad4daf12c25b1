"""A job: what a benchmark asks of its targets. Read from TOML of ten to twenty lines, or built from flags.

`read_job` and `make_job` are strict: an unknown key, a wrong type or an impossible number raises `ConfigError` that
names the place and, for a slip, the key that was meant. A job opens nothing and measures nothing.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rewarm.errors import ConfigError
from rewarm.units import parse_rate

CONCURRENCY_MAX = 1024
"""Requests of one wave; each holds a destination in memory."""
REPEATS_MAX = 100
TARGETS_MAX = 16
TOKENS_MAX = 1 << 24
GPUS_MAX = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A medium under test. With `emulated_bytes_per_s` its reads are slowed down to that rate, and so labelled."""

    url: str
    emulated_bytes_per_s: float | None = None


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cold recovery: `sessions` distinct prefixes of `tokens` are stored, then waves of them restored.

    A wave of `concurrency` requests starts at one moment, each for its own session, beginning with session 0; every
    target runs every wave `repeats` times, interleaved. `new_tokens` follow each prefix and are prefilled by a model.
    """

    model: str
    tokens: int
    targets: dict[str, Target]
    block_tokens: int = 256
    kv_dtype: str | None = None
    tp: int = 1
    concurrency: tuple[int, ...] = (8, 16, 32)
    sessions: int | None = None
    new_tokens: int = 0
    gpu: str | None = None
    gpus: int | None = None
    repeats: int = 3
    seed: int = 0

    @property
    def session_count(self) -> int:
        """Sessions stored: what was asked for, else as many as the largest wave needs."""
        return self.sessions if self.sessions is not None else max(self.concurrency)


def read_job(path: Path, changes: Mapping[str, Any] | None = None) -> Job:
    """Read a job file; `changes` (for example flags) replace its keys. Raises `ConfigError`."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the job {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return make_job(table | dict(changes or {}), str(path))


def make_job(table: Mapping[str, Any], where: str) -> Job:
    """Build a job from plain values; `where` names their source in errors. A target is a URL or a table.

    A target's table has `url` and, for an emulated medium, `rate` such as "6.9GB/s".
    """
    _check_keys(table, Job.__struct_fields__, where)
    for need in ("model", "tokens", "targets"):
        if not table.get(need):
            raise ConfigError(f"{where}: '{need}' is missing; a job needs model, tokens and at least one target")
    if not isinstance(table["targets"], Mapping):
        raise ConfigError(f"{where}: 'targets' is a table of names and URLs")
    targets = {name: _target(value, f"{where}: target {name!r}") for name, value in table["targets"].items()}
    try:
        job = msgspec.convert({**table, "targets": targets}, Job)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check(job, where)
    return job


def _target(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"url": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is a URL or a table with 'url'")
    _check_keys(value, ("url", "rate"), where)
    if not isinstance(value.get("url"), str):
        raise ConfigError(f"{where}: 'url' is missing")
    rate = value.get("rate")
    return {"url": value["url"], "emulated_bytes_per_s": None if rate is None else parse_rate(rate)}


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _check(job: Job, where: str) -> None:
    """Refuse what cannot be run, naming the key."""
    _in_range(where, "tokens", job.tokens, 1, TOKENS_MAX)
    _in_range(where, "block_tokens", job.block_tokens, 1, job.tokens)
    _in_range(where, "repeats", job.repeats, 1, REPEATS_MAX)
    _in_range(where, "new_tokens", job.new_tokens, 0, TOKENS_MAX)
    _in_range(where, "seed", job.seed, 0, 2**63 - 1)
    _in_range(where, "gpus", 1 if job.gpus is None else job.gpus, 1, GPUS_MAX)
    if not job.concurrency or len(set(job.concurrency)) != len(job.concurrency):
        raise ConfigError(f"{where}: 'concurrency' is a list of different numbers, got {list(job.concurrency)}")
    for wave in job.concurrency:
        _in_range(where, "concurrency", wave, 1, CONCURRENCY_MAX)
    if job.session_count < max(job.concurrency):
        raise ConfigError(
            f"{where}: {job.session_count} sessions cannot fill a wave of {max(job.concurrency)}; "
            "raise 'sessions' or lower 'concurrency'"
        )
    if not 1 <= len(job.targets) <= TARGETS_MAX:
        raise ConfigError(f"{where}: a job has 1 to {TARGETS_MAX} targets, got {len(job.targets)}")
    for name, target in job.targets.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: a target's name is letters, digits, '.', '_' and '-', got {name!r}")
        if target.emulated_bytes_per_s is not None and not target.emulated_bytes_per_s > 0:
            raise ConfigError(f"{where}: target {name!r}: an emulated rate must be above 0")


def _in_range(where: str, name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{where}: {name!r} must be from {least} to {most}, got {value}")
