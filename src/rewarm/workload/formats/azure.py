"""Azure LLM inference traces: CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`. Lengths and arrivals, no reuse."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime

from rewarm.errors import ConfigError
from rewarm.workload.formats.source import Source
from rewarm.workload.requests import Row, Trace

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
NOTE = "the format has lengths and arrivals only: no hit rate can be computed from it"


def matches(first_line: str) -> bool:
    """Whether the first line of a file is the header of this format."""
    return first_line.strip().split(",") == COLUMNS


def open_source(source: Source) -> Trace:
    """The trace behind a CSV file."""

    def rows() -> Iterator[Row]:
        lines = source.lines()
        next(lines)
        for where, text in lines:
            cells = next(csv.reader([text]))
            try:
                stamp, context, generated = cells
                yield Row(where, _seconds(stamp), int(context), int(generated), [])
            except ValueError as error:
                raise ConfigError(f"{where}: not a row of {','.join(COLUMNS)} ({error})") from error

    return Trace(str(source.path), "azure", None, (NOTE,), rows)


def _seconds(stamp: str) -> float:
    """Seconds since the epoch; the traces write seven digits of a second, one more than `datetime` reads."""
    head, dot, fraction = stamp.partition(".")
    digits = fraction.split("+")[0].rstrip("Z") if dot else "0"
    return datetime.fromisoformat(head + "+00:00").timestamp() + float(f"0.{digits}")
