"""`rewarm record vllm URL TRACE`: how to start an engine so that it writes a trace of what it looks up and saves."""

from __future__ import annotations

from pathlib import Path

import click

from rewarm.cli.bench_command import check_out
from rewarm.cli.connect_command import STAGING
from rewarm.cli.connect_output import answer
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import SIZE, STORE_URL
from rewarm.connectors.vllm.launch import launch
from rewarm.connectors.vllm.versions import SUPPORTED, installed_version


@click.group()
def command() -> None:
    """Record what an engine looks up and saves: a trace for `rewarm trace`, `plan` and `bench`, its keys hashed."""


@command.command()
@click.argument("url", type=STORE_URL)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--model", help="What vLLM is to serve: a directory, or a name.")
@click.option("--staging", type=SIZE, default=STAGING, show_default=True, help="vLLM's own region in /dev/shm.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size.")
@output_options
def vllm(output: Output, url: str, trace: Path, model: str | None, staging: float, tp: int) -> None:
    """The command line that starts vLLM over the store at URL, recording to TRACE while it serves.

    The keys are hashed with a secret that is not kept, so that the file tells which blocks are equal and nothing else.
    A file that is there already is kept; the recording gets the next free number in its name.
    """
    check_out(str(trace))
    found = launch(
        url,
        version=installed_version() or f"{SUPPORTED[-1]}.0",
        staging_bytes=int(staging),
        model=model,
        tensor_parallel=tp,
        record=str(trace.absolute()),
    )
    answer(output, f"vLLM {found.version}", found, None)
    output.note(f"afterwards: rewarm trace {trace}")
