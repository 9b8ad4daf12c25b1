"""`rewarm connect ENGINE URL`: the exact command line for the installed engine; `--check` tries every part of it."""

from __future__ import annotations

import click

from rewarm.cli.connect_lmcache import lmcache
from rewarm.cli.connect_others import sglang, transformers
from rewarm.cli.connect_output import answer
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import SIZE, STORE_URL
from rewarm.connectors.vllm.checks import Plan, run_checks
from rewarm.connectors.vllm.launch import launch
from rewarm.connectors.vllm.versions import SUPPORTED, installed_version

STAGING = "8GiB"


@click.group()
def command() -> None:
    """Print how to start an engine over a store, and try whether it would work."""


@command.command()
@click.argument("url", type=STORE_URL)
@click.option("--model", help="What vLLM is to serve: a directory, or a name.")
@click.option("--staging", type=SIZE, default=STAGING, show_default=True, help="vLLM's own region in /dev/shm.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size.")
@click.option("--tokens", type=click.IntRange(1), help="Longest context; default: the model's.")
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True, help="Requests in flight.")
@click.option("--namespace", help="Answer yourself for what shares blocks, instead of the engine's configuration.")
@click.option("--check", is_flag=True, help="Try every part; exit code 1 when one fails.")
@output_options
def vllm(
    output: Output,
    url: str,
    model: str | None,
    staging: float,
    tp: int,
    tokens: int | None,
    concurrency: int,
    namespace: str | None,
    check: bool,
) -> None:
    """The command line that starts vLLM over the store at URL. Run it in vLLM's own environment."""
    version = installed_version()
    if version is None:
        output.note(f"vLLM is not installed here; this is for {SUPPORTED[-1]}. Run it in vLLM's own environment.")
    found = launch(
        url,
        version=version or f"{SUPPORTED[-1]}.0",
        staging_bytes=int(staging),
        model=model,
        tensor_parallel=tp,
        namespace=namespace,
    )
    plan = Plan(url=url, staging_bytes=int(staging), model=model, tokens=tokens, concurrency=concurrency)
    checks = list(run_checks(plan)) if check else None
    answer(output, f"vLLM {found.version}", found, checks)


command.add_command(lmcache)
command.add_command(sglang)
command.add_command(transformers)
