"""The job that a command line means: every key of a job file as an option, which replaces what the file says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from rewarm.cli.parameters import as_url
from rewarm.errors import ConfigError
from rewarm.units import parse_rate
from rewarm.workload.job import Job, Target, make_job, read_job

MODEL_DEFAULT = "Llama-3.1-8B"
TOKENS_DEFAULT = 2048

F = TypeVar("F", bound=Callable[..., Any])

_NAMED = {
    "rates": ("--emulate", "RATE", "Slow a target down to, say, 2GB/s."),
    "orders": ("--order", "ORDER", "How a target serves requests: arrival, shortest or together."),
    "served": ("--served-model", "MODEL", "Model that a server serves; the first that it lists if left out."),
    "apis": ("--api", "API", "What a server is asked by: chat or completions.  [default: chat]"),
    "restarts": ("--restart", "COMMAND", "Command that restarts a server, run before each cell."),
    "caches": ("--cache-tokens", "N", "Tokens that a server's own memory holds, to overflow it."),
    "colds": ("--cold", "HOW", "How a server is made cold: restart, overflow or none."),
    "places": ("--connections", "N", "Connections to a server at once."),
    "bodies": ("--body", "JSON", "Added to every request to a server, for example '{\"ignore_eos\": true}'."),
}
"""parameter -> (option, what stands after NAME=, help): options about one target or server."""

_SERVER_KEYS = {
    "served": "model",
    "apis": "api",
    "restarts": "restart",
    "caches": "cache_tokens",
    "colds": "cold",
    "places": "connections",
    "bodies": "body",
}
"""parameter -> key of a server."""

_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option("--target", "targets", metavar="NAME=URL", multiple=True, help="A store to measure; once for each."),
    click.option("--server", "servers", metavar="NAME=URL", multiple=True, help="A live server; once for each."),
    *(click.option(option, name, metavar=f"NAME={what}", multiple=True, help=text)
      for name, (option, what, text) in _NAMED.items()),
    click.option("--model", metavar="MODEL", help=f"Preset or config.json.  [default: {MODEL_DEFAULT}]"),
    click.option("--tokens", type=int, help=f"Tokens that each request restores.  [default: {TOKENS_DEFAULT}]"),
    click.option("--new-tokens", type=int, help="Tokens after the prefix, prefilled anew.  [default: 0]"),
    click.option("--output-tokens", type=int, help="Tokens that a server answers with.  [default: 32]"),
    click.option("--block-tokens", type=int, help="Tokens of a block.  [default: 256]"),
    click.option("--kv-dtype", metavar="DTYPE", help="fp8, bf16, fp16 or fp32; the model's own if left out."),
    click.option("--tp", type=int, help="Tensor parallel ranks.  [default: 1]"),
    click.option("--concurrency", metavar="N,N,..", help="Requests of a cell.  [default: 8,16,32]"),
    click.option("--shape", type=click.Choice(["wave", "closed", "open", "trace"]), help="[default: wave]"),
    click.option("--think", "think_s", metavar="TIME", help="Closed: between an answer and the next request."),
    click.option("--rounds", type=int, help="Closed: requests of each client.  [default: 4]"),
    click.option("--rate", "requests_per_s", type=float, help="Open: requests a second."),
    click.option("--trace", metavar="FILE", help="Trace: when requests come and how long they are."),
    click.option("--sessions", type=int, help="Sessions stored; as many as the largest cell needs if left out."),
    click.option("--populate/--no-populate", default=None, help="Fill the servers first.  [default: populate]"),
    click.option("--recompute/--no-recompute", default=None, help="Measure unseen prompts on servers, too."),
    click.option("--write-rate", "write_bytes_per_s", metavar="RATE", help="Save beside the restores, say 1GB/s."),
    click.option("--fresh-rate", "fresh_requests_per_s", type=float, help="New prompts a second beside the restores."),
    click.option("--timeout", "timeout_s", metavar="TIME", help="A request to a server ends then.  [default: 15min]"),
    click.option("--gpu", metavar="GPU", help="GPU of the modelled recompute.  [default: H100]"),
    click.option("--gpus", type=int, help="How many of them; as many as ranks if left out."),
    click.option("--repeats", type=int, help="Rounds over all targets.  [default: 3]"),
    click.option("--seed", type=int, help="Contents and keys follow from it.  [default: 0]"),
    click.option("--objective", metavar="LINE", help="For example 'ttft_p90 <= 2 s'; missed: exit code 1."),
)  # fmt: skip


def job_options(function: F) -> F:
    """Give a verb the argument JOB and all options of a job; it gets the finished job as `job`."""

    @functools.wraps(function)
    def wrapped(*args: Any, job: Path | None, **given: Any) -> Any:
        rest = {name: given.pop(name) for name in list(given) if name not in _names()}
        return function(*args, job=job_of(job, **given), **rest)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return click.argument("job", required=False, type=click.Path(path_type=Path))(wrapped)  # type: ignore[return-value]


@functools.cache
def _names() -> frozenset[str]:
    """Parameters of the options above."""
    probe: Any = functools.reduce(lambda function, option: option(function), _OPTIONS, lambda: None)
    return frozenset(parameter.name for parameter in probe.__click_params__)


def job_of(path: Path | None, targets: Sequence[str], servers: Sequence[str], **flags: Any) -> Job:
    """The job of a file and options, either of which may be missing. Raises `ConfigError`."""
    named = {name: _pairs(name, flags.pop(name)) for name in _NAMED}
    changes = {name: value for name, value in flags.items() if value is not None}
    if "concurrency" in changes:
        changes["concurrency"] = _numbers(changes["concurrency"])
    if targets:
        found = {name: as_url(url) for name, url in _split("--target", "URL", targets).items()}
        changes |= {"targets": found, "servers": {}}
    if servers:
        changes |= {"servers": _split("--server", "URL", servers), "targets": changes.get("targets", {})}
    if path is None:
        if not targets and not servers:
            raise ConfigError(
                "nothing to measure; give a job file, or --target NAME=URL or --server NAME=URL at least once"
            )
        model = {"model": MODEL_DEFAULT} if targets else {}
        changes = {**model, "tokens": TOKENS_DEFAULT, **changes}
    job = make_job(changes, "command line") if path is None else read_job(path, changes)
    return _with_servers(_with_targets(job, named), named)


def _with_targets(job: Job, named: dict[str, dict[str, str]]) -> Job:
    """The job with what options say about single targets. Raises `ConfigError` for a target that it does not have."""
    tables: dict[str, dict[str, Any]] = {name: msgspec.to_builtins(target) for name, target in job.targets.items()}
    for parameter, key in (("rates", "emulated_bytes_per_s"), ("orders", "order")):
        for name, text in named[parameter].items():
            _known(parameter, name, text, tables)
            tables[name][key] = parse_rate(text) if parameter == "rates" else text
    return msgspec.structs.replace(job, targets=_converted(tables, dict[str, Target], "command line"))


def _with_servers(job: Job, named: dict[str, dict[str, str]]) -> Job:
    """The job with what options say about single servers. Raises `ConfigError`."""
    tables: dict[str, dict[str, Any]] = {name: msgspec.to_builtins(server) for name, server in job.servers.items()}
    for parameter, key in _SERVER_KEYS.items():
        for name, text in named[parameter].items():
            _known(parameter, name, text, tables)
            tables[name][key] = _value(parameter, text)
    return make_job({**_plain(job), "servers": tables}, "command line") if job.servers else job


def _plain(job: Job) -> dict[str, Any]:
    table: dict[str, Any] = msgspec.to_builtins(job)
    return table


def _value(parameter: str, text: str) -> Any:
    """A value as the job wants it."""
    option = _NAMED[parameter][0]
    try:
        if parameter in ("caches", "places"):
            return int(text)
        return msgspec.json.decode(text, type=dict[str, Any]) if parameter == "bodies" else text
    except (ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{option}: cannot read {text!r}: {error}") from None


def _converted(tables: dict[str, Any], kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(tables, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _known(parameter: str, name: str, text: str, tables: dict[str, Any]) -> None:
    if name not in tables:
        what = "server" if parameter in _SERVER_KEYS else "target"
        have = f"one of {', '.join(tables)}" if tables else f"the job has no {what}s"
        raise ConfigError(f"{_NAMED[parameter][0]} {name}={text}: no {what} {name!r}; {have}")


def _pairs(parameter: str, texts: Sequence[str]) -> dict[str, str]:
    option, what, _ = _NAMED[parameter]
    return _split(option, what, texts)


def _split(option: str, what: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE of a repeated option. Raises `ConfigError` for another form or a name given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{option} {text!r}: write NAME={what}, for example {option} {_EXAMPLE[option]}")
        if name in found:
            raise ConfigError(f"{option} {text!r}: the name {name!r} is given twice")
        found[name] = value
    return found


_EXAMPLE = {
    "--target": "local=file:///mnt/nvme0",
    "--server": "vllm=http://localhost:8000/v1",
    "--emulate": "local=2GB/s",
    "--order": "local=shortest",
    "--served-model": "vllm=Qwen/Qwen3-32B",
    "--api": "vllm=completions",
    "--restart": "vllm='systemctl restart vllm'",
    "--cache-tokens": "vllm=500000",
    "--cold": "vllm=none",
    "--connections": "vllm=64",
    "--body": "vllm='{\"ignore_eos\": true}'",
}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--concurrency: cannot read {text!r}; write whole numbers such as 8,16,32") from None
