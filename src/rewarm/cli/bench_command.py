"""`rewarm bench`: cold recovery measured on stores or live servers, against each other and against recompute."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rewarm.bench.objectives import judge_objective
from rewarm.bench.replay import run_job
from rewarm.bench.result import Result
from rewarm.cli import exits
from rewarm.cli.exporter import StoreWatch, served
from rewarm.cli.job_options import job_options
from rewarm.cli.measuring import interruptible, stages_of
from rewarm.cli.output import Output, output_options, to_json, write_file
from rewarm.cli.recovery_table import show_result
from rewarm.errors import ConfigError
from rewarm.report import render
from rewarm.workload.job import Job
from rewarm.workload.objective import parse_objective

KEY_VARIABLE = "OPENAI_API_KEY"
"""Where the key of a server that wants one is found, as other clients do."""


@click.command()
@job_options
@click.option("-o", "out", type=click.Path(), help="Write the whole result as JSON to this file.")
@click.option("--report", type=click.Path(), metavar="FILE", help="Write the result as an HTML page, too.")
@click.option("--ray", metavar="ADDRESS", help="Run on every node of this Ray cluster at once; auto finds one here.")
@click.option("--cross", is_flag=True, help="With --ray: each node restores what another one stored.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve the stores' counters to Prometheus while it runs.")
@output_options
def command(
    output: Output, job: Job, out: str | None, report: str | None, ray: str | None, cross: bool, metrics: str | None
) -> None:
    """Measure cold recovery: store sessions, forget them in memory, restore many of them at once.

    JOB is a TOML file, see examples/jobs; options replace what it says. A target is a store: data is written below its
    directory and removed afterwards. A server is any OpenAI-compatible one, measured by streaming; a key is taken from
    OPENAI_API_KEY. Ends with 1 when something failed, came back wrong, was not read cold, or missed the objective.
    """
    for path in (out, report):
        check_out(path)
    if cross and ray is None:
        raise ConfigError("--cross needs --ray: one node has no other to read from")
    with interruptible(output):
        if ray is not None:
            result = _on_hosts(output, job, ray, cross)
        else:
            result = _on_servers(output, job) if job.servers else _on_stores(output, job, metrics)
    finish(output, result, out, report)


def _on_stores(output: Output, job: Job, metrics: str | None) -> Result:
    watch = StoreWatch()
    with served(metrics, watch.families, output.note):
        return run_job(job, stages_of(output), output.note, opened=watch.add)


def _on_servers(output: Output, job: Job) -> Result:
    run_live = _imported("rewarm.bench.live.run", "bench").run_live
    result: Result = run_live(job, stages_of(output, "requests"), output.note, api_key=os.environ.get(KEY_VARIABLE))
    return result


def _on_hosts(output: Output, job: Job, address: str, cross: bool) -> Result:
    run_on_hosts = _imported("rewarm.bench.hosts", "ray").run_on_hosts
    result: Result = run_on_hosts(job, stages_of(output), output.note, address=address, cross=cross)
    return result


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
    bad = [*result.failures, *_missed(result)]
    for line in bad:
        exits.show_error(line)
    if bad:
        click.get_current_context().exit(exits.FINDINGS)


def _missed(result: Result) -> list[str]:
    """What the job's objective says about every summary that misses it."""
    line = result.job.get("objective")
    judgements = judge_objective(parse_objective(line), result.summary) if line else []
    return [judgement.sentence for judgement in judgements if not judgement.met]


def _imported(module: str, extra: str) -> Any:
    """A module that needs an extra. Raises `ConfigError` that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs the package {error.name}: pip install 'rewarm[{extra}]'") from error


def check_out(out: str | None) -> None:
    """Refuse a result file that cannot be written before the run, not after it. Raises `ConfigError`."""
    if out is None:
        return
    folder = Path(out).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {out}: there is no directory {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {out}: no permission in {folder}")
