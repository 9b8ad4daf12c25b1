"""From results to one self-contained HTML page that opens from disk: charts, style and script are inside it.

The page asks nothing of a network: its own policy forbids that. The charts are drawn by plotly.js (basic bundle, in
`static/`, unmodified). Every result is in the page as JSON too.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import msgspec

from rewarm.bench.result import SCHEMA as BENCH_SCHEMA
from rewarm.bench.result import Result
from rewarm.errors import ConfigError
from rewarm.plan.result import SCHEMA as PLAN_SCHEMA
from rewarm.plan.result import Plan
from rewarm.report.bench_document import bench_document
from rewarm.report.model import Document, Value
from rewarm.report.plan_document import plan_document

PLOTLY = "plotly-basic-4.1.1.min.js"


def read_result(text: str | bytes, where: str) -> Result | Plan:
    """A result or a plan from its JSON; `where` names the file. Raises `ConfigError` for anything else."""
    try:
        schema = msgspec.json.decode(text, type=_Schema).schema
        if schema == PLAN_SCHEMA:
            return msgspec.json.decode(text, type=Plan)
        if schema == BENCH_SCHEMA and b'"cells"' in (text.encode() if isinstance(text, str) else text):
            return msgspec.json.decode(text, type=Result)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not the JSON of a result or a plan: {error}") from error
    raise ConfigError(
        f"{where} is neither a result of `rewarm bench -o` nor a plan of `rewarm plan -o` (its schema is {schema!r}); "
        "a report is made of those"
    )


class _Schema(msgspec.Struct):
    schema: str | int


def render(results: Sequence[Result | Plan]) -> str:
    """The page of these results, in their order. Raises `ConfigError` when there is none."""
    if not results:
        raise ConfigError("nothing to report; give a result of `rewarm bench -o` or a plan of `rewarm plan -o`")
    documents = [_document(result, place) for place, result in enumerate(results)]
    return _environment().get_template("report.html").render(
        documents=documents,
        title=documents[0].title if len(documents) == 1 else f"{len(documents)} results",
        version=results[0].version,
        css=_static("report.css"),
        plotly=_static(PLOTLY),
        script=_static("report.js"),
    )  # fmt: skip


def _document(result: Result | Plan, place: int) -> Document:
    return bench_document(result, place) if isinstance(result, Result) else plan_document(result, place)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rewarm.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = _embedded
    environment.filters["plain_json"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.tests["value"] = lambda cell: isinstance(cell, Value)
    return environment


def _embedded(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _static(name: str) -> str:
    """A file of ours, put into the page as it is."""
    return (resources.files("rewarm.report") / "static" / name).read_text(encoding="utf-8")
