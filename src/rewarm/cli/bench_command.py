"""`rewarm bench`: cold recovery measured on one or more stores, against each other and against recompute."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from rewarm.bench.replay import run_job
from rewarm.bench.result import Result
from rewarm.cli import exits
from rewarm.cli.exporter import StoreWatch, served
from rewarm.cli.measuring import interruptible, stages_of
from rewarm.cli.output import Output, output_options, to_json, write_file
from rewarm.cli.parameters import as_url
from rewarm.cli.recovery_table import show_result
from rewarm.errors import ConfigError
from rewarm.report import render
from rewarm.units import parse_rate
from rewarm.workload.job import Job, Target, make_job, read_job

_MODEL_DEFAULT = "Llama-3.1-8B"
_TOKENS_DEFAULT = 2048


@click.command()
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--target", "targets", metavar="NAME=URL", multiple=True, help="A store to measure; once for each.")
@click.option("--emulate", "rates", metavar="NAME=RATE", multiple=True, help="Slow a target down to, say, 2GB/s.")
@click.option("--model", metavar="MODEL", help=f"Preset or config.json.  [default: {_MODEL_DEFAULT}]")
@click.option("--tokens", type=int, help=f"Tokens that each request restores.  [default: {_TOKENS_DEFAULT}]")
@click.option("--new-tokens", type=int, help="Tokens after the prefix whose prefill is modelled.  [default: 0]")
@click.option("--block-tokens", type=int, help="Tokens of a block.  [default: 256]")
@click.option("--kv-dtype", metavar="DTYPE", help="fp8, bf16, fp16 or fp32; the model's own if left out.")
@click.option("--tp", type=int, help="Tensor parallel ranks.  [default: 1]")
@click.option("--concurrency", metavar="N,N,..", help="Requests that start together.  [default: 8,16,32]")
@click.option("--sessions", type=int, help="Sessions stored; as many as the largest wave if left out.")
@click.option("--gpu", metavar="GPU", help="GPU of the modelled recompute.  [default: H100]")
@click.option("--gpus", type=int, help="How many of them; as many as ranks if left out.")
@click.option("--repeats", type=int, help="Rounds over all targets.  [default: 3]")
@click.option("--seed", type=int, help="Contents and keys follow from it.  [default: 0]")
@click.option("-o", "out", type=click.Path(), help="Write the whole result as JSON to this file.")
@click.option("--report", type=click.Path(), metavar="FILE", help="Write the result as an HTML page, too.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve the stores' counters to Prometheus while it runs.")
@output_options
def command(
    output: Output,
    job: Path | None,
    targets: Sequence[str],
    rates: Sequence[str],
    out: str | None,
    report: str | None,
    metrics: str | None,
    **flags: Any,
) -> None:
    """Measure cold recovery: store sessions, forget them in memory, restore a wave of them at once.

    JOB is a TOML file, see examples/jobs; options replace what it says. Data is written below each target's
    directory and removed afterwards. Ends with 1 when a block missed, came back wrong, or was not read cold.
    """
    run = _job(job, targets, rates, flags)
    for path in (out, report):
        check_out(path)
    watch = StoreWatch()
    with interruptible(output), served(metrics, watch.families, output.note):
        result = run_job(run, stages_of(output), output.note, opened=watch.add)
    finish(output, result, out, report)


def finish(output: Output, result: Result, out: str | None, report: str | None) -> None:
    """Write and show a result; exit 1 when it is bad news."""
    if out is not None:
        write_file(out, to_json(result) + "\n")
    if report is not None:
        write_file(report, render([result]))
        output.note(f"report: {report}, open it in a browser")

    def show(console: Console) -> None:
        show_result(console, result)

    output.answer(result, show)
    for line in result.failures:
        exits.show_error(line)
    if result.failures:
        click.get_current_context().exit(exits.FINDINGS)


def check_out(out: str | None) -> None:
    """Refuse a result file that cannot be written before the run, not after it. Raises `ConfigError`."""
    if out is None:
        return
    folder = Path(out).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {out}: there is no directory {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {out}: no permission in {folder}")


def _job(path: Path | None, targets: Sequence[str], rates: Sequence[str], flags: dict[str, Any]) -> Job:
    """The job that a command line means."""
    changes = {name: value for name, value in flags.items() if value is not None}
    if "concurrency" in changes:
        changes["concurrency"] = _numbers(changes["concurrency"])
    if targets:
        changes["targets"] = {name: as_url(url) for name, url in _pairs("--target", "URL", targets).items()}
    if path is None:
        if not targets:
            raise ConfigError("nothing to measure; give a job file, or --target NAME=URL at least once")
        changes = {"model": _MODEL_DEFAULT, "tokens": _TOKENS_DEFAULT, **changes}
    job = make_job(changes, "command line") if path is None else read_job(path, changes)
    return _emulated(job, _pairs("--emulate", "RATE", rates))


def _emulated(job: Job, rates: dict[str, str]) -> Job:
    """The job with some targets slowed down. Raises `ConfigError` for a target that it does not have."""
    targets = dict(job.targets)
    for name, rate in rates.items():
        if name not in targets:
            raise ConfigError(f"--emulate {name}={rate}: no target {name!r}; one of {', '.join(targets)}")
        targets[name] = Target(url=targets[name].url, emulated_bytes_per_s=parse_rate(rate))
    return msgspec.structs.replace(job, targets=targets)


def _pairs(option: str, what: str, texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE of a repeated option. Raises `ConfigError` for another form or a name given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"{option} {text!r}: write NAME={what}, for example {option} local={_EXAMPLE[what]}")
        if name in found:
            raise ConfigError(f"{option} {text!r}: the name {name!r} is given twice")
        found[name] = value
    return found


_EXAMPLE = {"URL": "file:///mnt/nvme0", "RATE": "2GB/s"}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--concurrency: cannot read {text!r}; write whole numbers such as 8,16,32") from None
