"""`rewarm plan`: recompute, local drive or array, and how many."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import click

import rewarm
from rewarm.cli import exits
from rewarm.cli.output import Output, output_options, to_json, write_file
from rewarm.cli.plan_tables import show_plan
from rewarm.errors import ConfigError
from rewarm.plan import Plan, PlanSpec, TraceData, apply, apply_probe, calibrate, make_plan, make_spec, steps_max
from rewarm.plan.result import Calibration
from rewarm.plan.spec import Objective
from rewarm.report import render
from rewarm.workload import open_trace


@click.command()
@click.argument("plan", type=click.Path())
@click.option("--calibrate", "result", type=click.Path(), metavar="RESULT", help="Result of `rewarm bench -o` to fit.")
@click.option(
    "-o",
    "target",
    type=click.Path(),
    metavar="FILE",
    help="Write the plan, as JSON or as a page: NAME.json, NAME.html.",
)
@click.option("--inputs", is_flag=True, help="List every input: measured, given or assumed.")
@output_options
@click.pass_context
def command(
    ctx: click.Context, output: Output, plan: str, result: str | None, target: str | None, inputs: bool
) -> None:
    """Say what to buy: recompute, local drives or a shared array.

    PLAN is a TOML file: model, engine, media, fleet, workload, prices, objective; docs/reference/plan-toml.md lists its
    keys. Exit code 1 when an objective is given and nothing reaches it.
    """
    if target is not None and not target.endswith((".json", ".html")):
        raise ConfigError(f"-o {target}: a plan is written as JSON or as a page; use a name in .json or .html")
    path = Path(plan)
    given = _read_toml(path)
    spec = make_spec(given, plan)
    spec, sources = _probes(spec, path.parent)
    spec, calibration = _calibrated(spec, result, sources)
    with output.progress("planning", total=steps_max(spec), unit="steps") as progress:

        def step(name: str) -> None:
            progress.update(label=f"planning: {name}")
            progress.advance()

        answer = make_plan(
            spec,
            version=rewarm.__version__,
            trace=_trace(spec, path.parent, step),
            given=given,
            sources=sources,
            calibration=calibration,
            progress=step,
        )
    if target is not None:
        write_file(target, render([answer]) if target.endswith(".html") else to_json(answer) + "\n")
        output.note(f"wrote {target}")
    output.answer(answer, lambda console: show_plan(console, answer, inputs))
    if missed(answer, spec):
        ctx.exit(exits.FINDINGS)


def missed(plan: Plan, spec: PlanSpec) -> bool:
    """Whether an objective was given and nothing reaches it."""
    return spec.objective != Objective() and not plan.verdict.met


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _probes(spec: PlanSpec, folder: Path) -> tuple[PlanSpec, dict[str, str]]:
    """The plan with the rates of its probe files, whose names count from the plan's own folder."""
    sources = {}
    for medium in spec.medium:
        if medium.probe is not None:
            file = folder / medium.probe
            spec = apply_probe(spec, medium.name, file.read_bytes(), str(file))
            for field in ("drive_read", "drive_write", "effective_read"):
                sources[f"medium.{medium.name}.{field}"] = str(file)
    return spec, sources


def _calibrated(
    spec: PlanSpec, result: str | None, sources: dict[str, str]
) -> tuple[PlanSpec, tuple[Calibration, ...]]:
    if result is None:
        return spec, ()
    peaks = {
        medium.name: medium.drive_read * medium.drives
        for medium in spec.medium
        if medium.drive_read is not None and f"medium.{medium.name}.drive_read" in spec.measured
    }
    fits = calibrate(Path(result).read_bytes(), result, peaks)
    for fit in fits:
        for field in ("fixed_time", "effective_read"):
            sources[f"medium.{fit.target}.{field}"] = result
    return apply(spec, fits), fits


def _trace(spec: PlanSpec, folder: Path, step: Any) -> TraceData | None:
    if spec.workload.trace is None:
        return None
    step("reading the trace")
    trace = open_trace(folder / spec.workload.trace)
    if trace.block_tokens is None:
        raise ConfigError(f"workload.trace: {trace.path} ({trace.format}) names no blocks, so no hits can be planned")
    return TraceData(trace.load(), trace.block_tokens)
