"""A job: what a benchmark asks of its targets or servers. Read from TOML of ten to twenty lines, or built from flags.

`read_job` and `make_job` are strict: an unknown key, a wrong type or an impossible number raises `ConfigError` that
names the place and, for a slip, the key that was meant. A job opens nothing and measures nothing.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rewarm.errors import ConfigError
from rewarm.units import parse_duration, parse_rate
from rewarm.workload.objective import parse_objective

CONCURRENCY_MAX = 1024
"""Requests of one wave; each holds a destination in memory, or a connection."""
REPEATS_MAX = 100
TARGETS_MAX = 16
TOKENS_MAX = 1 << 24
GPUS_MAX = 4096
ROUNDS_MAX = 1000
SECONDS_MAX = 86400.0
RATE_MAX = 1e6
"""Requests a second; beyond is a slip."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

Shape = Literal["wave", "closed", "open", "trace"]
Order = Literal["arrival", "together", "shortest"]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A medium under test. With `emulated_bytes_per_s` its reads are slowed down to that rate, and so labelled.

    `order`: requests are served one after another as they came (`arrival`), the one with the least left first
    (`shortest`), or all at once, side by side, so that they end together (`together`).
    """

    url: str
    emulated_bytes_per_s: float | None = None
    order: Order = "arrival"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An OpenAI-compatible server under test. `cold` says how its cache is emptied before each cell: a `restart`
    command, prompts that overflow its `cache_tokens`, or not at all (`none`); null: a restart if there is a command,
    else overflow.

    `model` is the name it serves (null: the first that it lists), `api` which of its two ways is asked, `body` what is
    added to every request, `connections` how many are used at once (null: as many as there are requests).
    """

    url: str
    model: str | None = None
    api: Literal["chat", "completions"] = "chat"
    cold: Literal["restart", "overflow", "none"] | None = None
    restart: str | None = None
    cache_tokens: int | None = None
    connections: int | None = None
    body: dict[str, Any] = {}


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Cold recovery: `sessions` distinct prefixes of `tokens` are stored, then cells of them restored.

    A cell has a `concurrency` N and begins with session 0; every target runs every cell `repeats` times, interleaved:
    * `wave`: N requests start at one moment.
    * `closed`: N clients, each with `rounds` requests one after another, `think_s` after the answer before.
    * `open`: N requests arrive as a Poisson stream of `requests_per_s`.
    * `trace`: the first N requests of `trace`, at its times, with its lengths up to `tokens`.

    `new_tokens` follow each prefix, and a server answers with `output_tokens`. Beside a cell a store is written at
    `write_bytes_per_s`; a server gets `fresh_requests_per_s` prompts that it has never seen.
    """

    model: str = ""
    tokens: int
    targets: dict[str, Target] = {}
    servers: dict[str, Server] = {}
    block_tokens: int = 256
    kv_dtype: str | None = None
    tp: int = 1
    concurrency: tuple[int, ...] = (8, 16, 32)
    shape: Shape = "wave"
    think_s: float = 0.0
    rounds: int = 4
    requests_per_s: float | None = None
    trace: str | None = None
    sessions: int | None = None
    new_tokens: int = 0
    output_tokens: int = 32
    populate: bool = True
    recompute: bool = True
    write_bytes_per_s: float = 0.0
    fresh_requests_per_s: float = 0.0
    timeout_s: float = 900.0
    gpu: str | None = None
    gpus: int | None = None
    repeats: int = 3
    seed: int = 0
    objective: str | None = None

    @property
    def session_count(self) -> int:
        """Sessions stored: what was asked for, else as many as the largest cell needs."""
        return self.sessions if self.sessions is not None else self.requests(max(self.concurrency))

    def requests(self, concurrency: int) -> int:
        """Requests of a cell, each for a session of its own."""
        return concurrency * self.rounds if self.shape == "closed" else concurrency


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

    A target's table has `url`, `order`, and, for an emulated medium, `rate` such as "6.9GB/s". Durations and rates are
    numbers in the unit of their key, or text with a unit.
    """
    _check_keys(table, Job.__struct_fields__, where)
    for need in ("tokens", *(() if table.get("servers") else ("model", "targets"))):
        if not table.get(need):
            raise ConfigError(
                f"{where}: '{need}' is missing; a job needs tokens, and a model with at least one target, or servers"
            )
    given = {**table}
    for key, read in (("targets", _target), ("servers", _server)):
        if not isinstance(table.get(key, {}), Mapping):
            raise ConfigError(f"{where}: '{key}' is a table of names and URLs")
        given[key] = {name: read(value, f"{where}: {key[:-1]} {name!r}") for name, value in table.get(key, {}).items()}
    for key, parse in _WITH_UNITS.items():
        if isinstance(table.get(key), str):
            given[key] = parse(table[key])
    try:
        job = msgspec.convert(given, Job)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    _check(job, where)
    _check_shape(job, where)
    _check_targets(job, where)
    return job


_WITH_UNITS = {"think_s": parse_duration, "timeout_s": parse_duration, "write_bytes_per_s": parse_rate}


def _target(value: Any, where: str) -> dict[str, Any]:
    table = dict(_table(value, ("url", "rate", "order"), where))
    rate = table.pop("rate", None)
    return {**table, "emulated_bytes_per_s": None if rate is None else parse_rate(rate)}


def _server(value: Any, where: str) -> dict[str, Any]:
    return dict(_table(value, Server.__struct_fields__, where))


def _table(value: Any, known: Iterable[str], where: str) -> Mapping[str, Any]:
    """The table of a target or server; a plain URL is a table of that alone."""
    if isinstance(value, str):
        return {"url": value}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is a URL or a table with 'url'")
    _check_keys(value, known, where)
    if not isinstance(value.get("url"), str):
        raise ConfigError(f"{where}: 'url' is missing")
    return value


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")


def _check(job: Job, where: str) -> None:
    """Refuse what cannot be run, naming the key."""
    _in_range(where, "tokens", job.tokens, 1, TOKENS_MAX)
    if job.targets:
        _in_range(where, "block_tokens", job.block_tokens, 1, job.tokens)
    _in_range(where, "repeats", job.repeats, 1, REPEATS_MAX)
    _in_range(where, "new_tokens", job.new_tokens, 0, TOKENS_MAX)
    _in_range(where, "output_tokens", job.output_tokens, 1, TOKENS_MAX)
    _in_range(where, "rounds", job.rounds, 1, ROUNDS_MAX)
    _in_range(where, "think_s", job.think_s, 0, SECONDS_MAX)
    _in_range(where, "timeout_s", job.timeout_s, 0.1, SECONDS_MAX)
    _in_range(where, "fresh_requests_per_s", job.fresh_requests_per_s, 0, RATE_MAX)
    _in_range(where, "seed", job.seed, 0, 2**63 - 1)
    _in_range(where, "gpus", 1 if job.gpus is None else job.gpus, 1, GPUS_MAX)
    if not job.concurrency or len(set(job.concurrency)) != len(job.concurrency):
        raise ConfigError(f"{where}: 'concurrency' is a list of different numbers, got {list(job.concurrency)}")
    for wave in job.concurrency:
        _in_range(where, "concurrency", wave, 1, CONCURRENCY_MAX)
    if job.session_count < job.requests(max(job.concurrency)):
        raise ConfigError(
            f"{where}: {job.session_count} sessions cannot fill a {job.shape} of {max(job.concurrency)}, which needs "
            f"{job.requests(max(job.concurrency))}; raise 'sessions' or lower 'concurrency'"
        )
    if job.objective is not None:
        parse_objective(job.objective)


def _check_shape(job: Job, where: str) -> None:
    """Refuse keys of a shape that is not asked for, and a shape without its keys."""
    for shape, key in (("open", "requests_per_s"), ("trace", "trace")):
        value = getattr(job, key)
        if (value is not None) != (job.shape == shape):
            raise ConfigError(f"{where}: shape {shape!r} and {key!r} go together; give both or neither")
    if job.requests_per_s is not None and not 0 < job.requests_per_s <= RATE_MAX:
        raise ConfigError(f"{where}: 'requests_per_s' must be above 0 and at most {RATE_MAX:g}")
    if job.think_s and job.shape != "closed":
        raise ConfigError(f"{where}: 'think_s' belongs to the shape 'closed'")


def _check_targets(job: Job, where: str) -> None:
    if bool(job.targets) == bool(job.servers):
        raise ConfigError(f"{where}: a job measures targets or servers, each by a job of its own")
    if not 1 <= len(job.targets or job.servers) <= TARGETS_MAX:
        raise ConfigError(f"{where}: a job has 1 to {TARGETS_MAX} targets, got {len(job.targets or job.servers)}")
    for name in (*job.targets, *job.servers):
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{where}: a target's name is letters, digits, '.', '_' and '-', got {name!r}")
    for name, target in job.targets.items():
        if target.emulated_bytes_per_s is not None and not target.emulated_bytes_per_s > 0:
            raise ConfigError(f"{where}: target {name!r}: an emulated rate must be above 0")
    if job.targets and (job.fresh_requests_per_s or not job.populate):
        raise ConfigError(f"{where}: 'populate' and 'fresh_requests_per_s' belong to servers")
    if job.servers and job.write_bytes_per_s:
        raise ConfigError(f"{where}: 'write_bytes_per_s' belongs to targets; a server gets 'fresh_requests_per_s'")
    for name, server in job.servers.items():
        _check_server(server, f"{where}: server {name!r}")


def _check_server(server: Server, where: str) -> None:
    if not server.url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: the URL of a server begins with http:// or https://, got {server.url!r}")
    if server.cold == "restart" and server.restart is None:
        raise ConfigError(f"{where}: cold by restart needs 'restart', the command that restarts it")
    _in_range(where, "cache_tokens", 1 if server.cache_tokens is None else server.cache_tokens, 1, 2**48)
    _in_range(where, "connections", 1 if server.connections is None else server.connections, 1, 2**16)


def _in_range(where: str, name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{where}: {name!r} must be from {least} to {most}, got {value}")
