"""What a report consists of, before it is HTML: documents of sections with tables and charts.

Every figure is a `Value` that says where in the source JSON it stands, so that a test can hold the page against the
file. Charts carry traces of Plotly as plain dictionaries; colours come from the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rewarm.units import format_duration, format_rate, format_size

MISSING = "–"
"""What stands for a figure that could not be had."""


def _number(value: float) -> str:
    """Whole from a thousand on, three digits that matter below."""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def _decimal_size(value: float) -> str:
    """Capacities as drives are sold: 7.68e12 -> '7.68 TB'."""
    unit, scale = next(((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if value >= s), ("B", 1.0))
    return f"{value / scale:,.4g} {unit}"


def _share(value: float) -> str:
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "seconds": lambda value: format_duration(value) if value else "0 s",
    "rate": format_rate,
    "size": format_size,
    "capacity": _decimal_size,
    "bytes": lambda value: f"{value:,}",
    "share": _share,
    "change": lambda value: f"{value:+.1%}",
    "count": lambda value: f"{value:,.0f}",
    "number": _number,
    "ratio": lambda value: f"{value:.2f} ×",
    "usd": lambda value: f"{value:,.3g} USD",
    "years": lambda value: f"{value:.1f} years",
    "days": lambda value: f"{value / 86400:.3g} days",
    "text": lambda value: ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value),
    "word": lambda value: str(value).replace("_", " "),
    "claim": lambda value: "yes" if value else "no, within noise",
    "answer": lambda value: "yes" if value else "no",
    "nodes": lambda value: f"{value:,}",
}
"""How each kind of figure is written."""


@dataclass(frozen=True)
class Value:
    """A figure: its text, the value as it stands in the JSON, and where: `document:/json/pointer`."""

    text: str
    raw: Any
    pointer: str
    kind: str

    @property
    def numeric(self) -> bool:
        """Whether the figure is set to the right, as numbers are."""
        return self.kind not in ("text", "word", "claim", "answer")


@dataclass(frozen=True)
class Source:
    """One result as plain JSON, read by path. `document` is its place in the report."""

    document: int
    data: dict[str, Any]

    def at(self, kind: str, *path: str | int, missing: str = MISSING) -> Value:
        """The figure at a path, written as its kind is."""
        found: Any = self.data
        for step in path:
            found = None if found is None else found[step]
        text = missing if found is None else FORMATS[kind](found)
        return Value(text, found, pointer(self.document, *path), kind)


def pointer(document: int, *path: str | int) -> str:
    """`document:/json/pointer` (RFC 6901) of a path."""
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in path)
    return f"{document}:" + "".join(f"/{step}" for step in steps)


Cell = Value | str
Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; the first cell of a row is its heading. `folded`: shown on demand."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    folded: bool = False
    note: str = ""

    @property
    def slim(self) -> bool:
        """Whether the table needs half of the page only."""
        return len(self.columns) == 2

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, whether its figures are set to the right."""
        return tuple(
            all(cell.numeric for cell in column if isinstance(cell, Value)) and isinstance(column[0], Value)
            for column in zip(*self.rows, strict=True)
        )


@dataclass(frozen=True)
class Entry:
    """One entry of a legend: what it is called and how it is drawn."""

    name: str
    series: str
    dash: str = "solid"
    symbol: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart with everything that a reader needs who cannot see it: title, units, legend, text and table.

    `choices` name views of one chart: label -> the traces shown. `legend` entries toggle traces of the same name.
    """

    id: str
    title: str
    text: str
    layout: dict[str, Any]
    traces: tuple[dict[str, Any], ...]
    legend: tuple[Entry, ...]
    table: Table
    choice_label: str = ""
    choices: dict[str, list[int]] = field(default_factory=dict)
    axes: tuple[dict[str, Any], ...] = ()
    """For each choice what it changes in the layout; empty: nothing."""
    wide: bool = False
    height: int = 340

    @property
    def figure(self) -> dict[str, Any]:
        """What the page's script draws."""
        choices = list(self.choices.values())
        return {"traces": self.traces, "layout": self.layout, "choices": choices, "axes": self.axes}


@dataclass(frozen=True)
class Tile:
    """A figure that is shown large, with what it is and what it compares with."""

    label: str
    value: Value
    detail: tuple[Cell, ...]


@dataclass(frozen=True)
class Section:
    """A part of a document."""

    id: str
    title: str
    text: str = ""
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class Document:
    """One result as it is shown: verdict first. `alerts` say why it must not be believed."""

    title: str
    facts: str
    verdict: str
    verdict_rest: str
    findings: tuple[str, ...]
    alerts: tuple[str, ...]
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    source: dict[str, Any]
