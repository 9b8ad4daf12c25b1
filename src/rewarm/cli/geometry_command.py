"""`rewarm geometry`: how many bytes a model's KV cache takes, per token, per rank and per request."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table

from rewarm import geometry
from rewarm.cli.output import Output, output_options
from rewarm.geometry import LayerKind, Model
from rewarm.units import format_size


class LayerLine(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are alike: bytes per token of all of them while they remember it, each head once."""

    kind: str
    layers: int
    window: int | None
    bytes_per_token: int
    state_bytes: int


class GeometryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Totals are null without `--tokens`; block bytes count window layers too."""

    model: str
    architecture: str
    kv_dtype: str
    index_dtype: str | None
    tp: int
    pp: int
    tokens: int | None
    bytes_per_token: int
    bytes_per_rank_token: int
    bytes_total: int | None
    bytes_per_rank_total: int | None
    block_tokens: int
    block_bytes: int
    block_bytes_per_rank: int
    state_bytes: int
    layers: list[LayerLine]
    active_parameters: int | None
    active_parameters_source: str
    context_tokens: int | None
    notes: list[str]


@click.command()
@click.argument("model")
@click.option("--tokens", type=click.IntRange(min=0), help="Length of a request, for its total.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor parallel ranks.")
@click.option("--pp", type=click.IntRange(min=1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--kv-dtype", metavar="DTYPE", help="fp8, fp8_e5m2, bf16, fp16 or fp32; the model's own if left out.")
@click.option("--index-dtype", metavar="DTYPE", default="bf16", help="Of a sparse indexer's keys.  [default: bf16]")
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens of a block.")
@output_options
def command(
    output: Output,
    model: str,
    tokens: int | None,
    tp: int,
    pp: int,
    kv_dtype: str | None,
    index_dtype: str,
    block_tokens: int,
) -> None:
    """Show the bytes of a model's KV cache.

    MODEL is a Hugging Face config.json, a directory that has one, or the name of a bundled model such as Llama-3.1-8B.
    """
    found = geometry.load_model(model)
    dtype = found.kv_dtype if kv_dtype is None else geometry.parse_dtype(kv_dtype)
    found = msgspec.structs.replace(found, kv_dtype=dtype, index_dtype=geometry.parse_dtype(index_dtype))
    answer = _answer(found, tokens, tp, pp, block_tokens)
    output.answer(answer, lambda console: _show(console, answer))


def _answer(model: Model, tokens: int | None, tp: int, pp: int, block_tokens: int) -> GeometryAnswer:
    lines = _layer_lines(model)
    indexed = any(layer.index_dim for layer in model.layers)
    return GeometryAnswer(
        model=model.name,
        architecture=model.architecture,
        kv_dtype=model.kv_dtype,
        index_dtype=model.index_dtype if indexed else None,
        tp=tp,
        pp=pp,
        tokens=tokens,
        bytes_per_token=geometry.bytes_per_token(model),
        bytes_per_rank_token=geometry.bytes_per_rank_token(model, tp, pp),
        bytes_total=None if tokens is None else geometry.bytes_total(model, tokens),
        bytes_per_rank_total=None if tokens is None else geometry.bytes_per_rank_total(model, tokens, tp, pp),
        block_tokens=block_tokens,
        block_bytes=geometry.block_bytes(model, block_tokens),
        block_bytes_per_rank=geometry.block_bytes(model, block_tokens, tp, pp),
        state_bytes=geometry.state_bytes(model),
        layers=lines,
        active_parameters=model.active_parameters,
        active_parameters_source=model.active_parameters_source,
        context_tokens=model.context_tokens,
        notes=_notes(model, lines, tokens, tp),
    )


def _layer_lines(model: Model) -> list[LayerLine]:
    """One line for each kind of layer, in order of first appearance."""
    lines = []
    for layer in dict.fromkeys(model.layers):
        count = model.layers.count(layer)
        lines.append(
            LayerLine(
                kind=layer.kind,
                layers=count,
                window=layer.window or None,
                bytes_per_token=count * geometry.layer_bytes_per_token(layer, model.kv_dtype, model.index_dtype),
                state_bytes=count * geometry.layer_state_bytes(layer, model.kv_dtype, model.state_dtype),
            )
        )
    return lines


def _notes(model: Model, lines: list[LayerLine], tokens: int | None, tp: int) -> list[str]:
    notes = []
    for line in lines:
        if line.kind == LayerKind.SLIDING:
            notes.append(
                f"{line.layers} of {len(model.layers)} layers keep the last {line.window:,} tokens only: they add "
                f"{line.bytes_per_token:,} bytes per token up to there and nothing beyond, so bytes_per_token is what "
                f"one more token adds to the other layers; give --tokens for the total of a length"
            )
        if line.kind == LayerKind.LINEAR:
            notes.append(
                f"{line.layers} of {len(model.layers)} layers keep a state of {line.state_bytes:,} bytes in all, "
                f"whatever the length; it can be used again only at the positions where it was stored"
            )
    if tp > 1 and model.of_kind(LayerKind.MLA):
        notes.append("the latent of MLA is the same on every tensor parallel rank: store it once, not once per rank")
    heads = max(
        (layer.kv_heads for layer in model.layers if layer.kind in (LayerKind.FULL, LayerKind.SLIDING)), default=0
    )
    if 0 < heads < tp:
        notes.append(f"{heads} key/value heads on {tp} ranks: each head is held by {tp // heads} ranks")
    if tokens is not None and model.context_tokens is not None and tokens > model.context_tokens:
        notes.append(f"{tokens:,} tokens are more than the context the model names, {model.context_tokens:,}")
    return notes


def _show(console: Console, answer: GeometryAnswer) -> None:
    index = f", indexer {answer.index_dtype}" if answer.index_dtype else ""
    console.print(f"{answer.model} ({answer.architecture}), KV cache in {answer.kv_dtype}{index}")
    table = Table("layers", "kind", "remembers", "bytes per token")
    table.columns[0].justify = table.columns[3].justify = "right"
    for line in answer.layers:
        table.add_row(str(line.layers), line.kind.replace("_", " "), _remembers(line), f"{line.bytes_per_token:,}")
    console.print(table)
    ranks = f"tp {answer.tp}" + (f", pp {answer.pp}" if answer.pp > 1 else "")
    sums = Table("", "all ranks, each head once", f"largest rank ({ranks})")
    sums.columns[1].justify = sums.columns[2].justify = "right"
    sums.add_row("one more token", _size(answer.bytes_per_token), _size(answer.bytes_per_rank_token))
    block = f"block of {answer.block_tokens:,} tokens"
    sums.add_row(block, _size(answer.block_bytes), _size(answer.block_bytes_per_rank))
    if answer.bytes_total is not None and answer.bytes_per_rank_total is not None:
        total, rank = _size(answer.bytes_total), _size(answer.bytes_per_rank_total)
        sums.add_row(f"{answer.tokens:,} tokens", total, rank)
    console.print(sums)
    for note in answer.notes:
        console.print(f"note: {note}")


def _remembers(line: LayerLine) -> str:
    if line.kind == LayerKind.SLIDING:
        return f"the last {line.window:,} tokens"
    if line.kind == LayerKind.LINEAR:
        return f"a state of {format_size(line.state_bytes)} in all"
    return "every token"


def _size(count: int) -> str:
    return f"{count:,} B" + (f" ({format_size(count)})" if count >= 1024 else "")
