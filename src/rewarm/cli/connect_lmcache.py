"""`rewarm connect lmcache URL`: the flags of LMCache's server over a store; `--check` has LMCache try them."""

from __future__ import annotations

import click

from rewarm.cli.connect_output import answer
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import SIZE, STORE_URL
from rewarm.connectors.lmcache.checks import run_checks
from rewarm.connectors.lmcache.launch import launch
from rewarm.connectors.lmcache.versions import SUPPORTED, installed_version
from rewarm.connectors.vllm.versions import installed_version as vllm_version

STAGING = "8GiB"


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--model", help="The directory that the engine serves: its weights and configuration keep blocks apart.")
@click.option("--engine", help="The engine and its version, as free text; default: the vLLM installed here.")
@click.option("--namespace", help="Answer yourself for what shares blocks, instead of --model and --engine.")
@click.option("--staging", type=SIZE, default=STAGING, show_default=True, help="LMCache's own first level in memory.")
@click.option("--check", is_flag=True, help="Have LMCache start the adapter and move one object; exit code 1 if not.")
@output_options
def lmcache(
    output: Output,
    url: str,
    model: str | None,
    engine: str | None,
    namespace: str | None,
    staging: float,
    check: bool,
) -> None:
    """The command line that starts LMCache's server over the store at URL. Run it in LMCache's own environment."""
    version, vllm = installed_version(), vllm_version()
    if version is None:
        output.note(f"LMCache is not installed here; this is for {SUPPORTED[-1]}. Run it in LMCache's own environment.")
    if engine is None and vllm is not None:
        engine = f"vllm {'.'.join(vllm.split('.')[:2])}"
    found = launch(
        url,
        version=version or SUPPORTED[-1],
        staging_bytes=int(staging),
        model=model,
        engine=engine,
        namespace=namespace,
    )
    checks = list(run_checks(found.l2_adapter)) if check else None
    answer(output, f"LMCache {found.version}", found, checks)
