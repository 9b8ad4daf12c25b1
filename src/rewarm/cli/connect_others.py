"""`rewarm connect sglang|transformers URL`: the flags or the lines for the installed engine; `--check` tries them."""

from __future__ import annotations

import click

from rewarm.cli.connect_output import answer
from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.connectors.releases import installed
from rewarm.connectors.sglang import launch as sglang_launch
from rewarm.connectors.transformers import launch as transformers_launch


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--model", help="What SGLang is to serve: a directory, or a name.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size.")
@click.option("--namespace", help="Answer yourself for what shares pages, instead of the engine's arguments.")
@click.option("--check", is_flag=True, help="Try every part; exit code 1 when one fails.")
@output_options
def sglang(output: Output, url: str, model: str | None, tp: int, namespace: str | None, check: bool) -> None:
    """The command line that starts SGLang over the store at URL. Run it in SGLang's own environment."""
    version = installed("sglang")
    if version is None:
        output.note(f"SGLang is not installed here; this is for {sglang_launch.TESTED}.")
    found = sglang_launch.launch(url, version=version, model=model, tensor_parallel=tp, namespace=namespace)
    checks = list(sglang_launch.run_checks(url, model)) if check else None
    answer(output, f"SGLang {found.version}", found, checks)


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--model", help="The model: a directory, or a name.")
@click.option("--namespace", help="Answer yourself for what shares blocks, instead of the model's weights.")
@click.option("--check", is_flag=True, help="Try every part; exit code 1 when one fails.")
@output_options
def transformers(output: Output, url: str, model: str | None, namespace: str | None, check: bool) -> None:
    """The lines of Python that keep prefixes of a Transformers model in the store at URL."""
    found = transformers_launch.snippet(url, model=model, namespace=namespace)
    checks = list(transformers_launch.run_checks(url, model)) if check else None
    answer(output, "Python", found, checks)
