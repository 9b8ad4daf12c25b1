"""Traces and layouts of Plotly, as plain dictionaries. Pure; no colours: `meta.series` names one of the style sheet.

A trace carries the JSON pointers of its points in `customdata` and `meta.exact` says which coordinate they give. How a
line is drawn says where its figures come from: solid is measured, dashed emulated, dotted modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rewarm.report.model import Entry, Value

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
PATTERNS = ("", "/", "x", ".", "\\", "-")
MEASURED, EMULATED, MODELLED = "measured", "emulated", "modelled"
DASHES = {MEASURED: "solid", EMULATED: "dash", MODELLED: "dot"}
SERIES_MAX = 6
"""Colours that can be told apart; further series use them again with another symbol."""


def entry(name: str, place: int, origin: str) -> Entry:
    """The legend entry of the series at a place."""
    return Entry(name, str(place % SERIES_MAX), DASHES[origin], SYMBOLS[place % len(SYMBOLS)])


RECOMPUTE = "r"
"""The series of recompute, grey in every chart."""


def recompute_entry(origin: str = MODELLED) -> Entry:
    """The legend entry of recompute."""
    return Entry(f"recompute ({origin})", RECOMPUTE, DASHES[origin], "x")


def line(
    drawn: Entry, x: Sequence[Any], values: Sequence[Value], texts: Sequence[str], *, shape: str = "linear"
) -> dict[str, Any]:
    """A line with a marker at each value."""
    return {
        **_points(drawn, x, values, texts),
        "mode": "lines+markers",
        "line": {"dash": drawn.dash, "width": 2.5, "shape": shape},
        "marker": {"symbol": drawn.symbol, "size": 9},
        "connectgaps": False,
    }


def dots(drawn: Entry, x: Sequence[Any], values: Sequence[Value], texts: Sequence[str]) -> dict[str, Any]:
    """Small marks beside a line: the single readings that its medians come from."""
    return {
        **_points(drawn, x, values, texts),
        "mode": "markers",
        "marker": {"symbol": f"{drawn.symbol}-open", "size": 6},
        "opacity": 0.7,
    }


def marks(drawn: Entry, values: Sequence[Value], y: Sequence[Any], texts: Sequence[str]) -> dict[str, Any]:
    """Large marks along a horizontal axis; the values are the x."""
    trace = _points(drawn, [value.raw for value in values], values, texts)
    return {
        **trace,
        "y": list(y),
        "mode": "markers",
        "marker": {"symbol": drawn.symbol, "size": 13},
        "meta": {**trace["meta"], "exact": "x"},
    }


def level(drawn: Entry, x: Sequence[Any], value: Value, text: str) -> dict[str, Any]:
    """A thin horizontal line at one value."""
    return {
        **_points(drawn, x, [value] * len(x), [text] * len(x)),
        "mode": "lines",
        "line": {"dash": drawn.dash, "width": 1.2},
    }


def steps(drawn: Entry, values: Sequence[Value], shares: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """A cumulative distribution: the values are the x."""
    trace = _points(drawn, [value.raw for value in values], values, texts)
    return {
        **trace,
        "y": list(shares),
        "mode": "lines",
        "line": {"dash": drawn.dash, "width": 2.5, "shape": "hv"},
        "cliponaxis": False,
        "meta": {**trace["meta"], "exact": "x"},
    }


def bars(drawn: Entry, place: int, x: Sequence[Any], values: Sequence[Value], texts: Sequence[str]) -> dict[str, Any]:
    """Upright bars, told apart by pattern as well as colour."""
    trace = _points(drawn, x, values, texts)
    return {**trace, "type": "bar", "marker": {"pattern": _pattern(place)}}


def lying_bars(
    drawn: Entry, place: int, y: Sequence[Any], values: Sequence[Value], texts: Sequence[str]
) -> dict[str, Any]:
    """Bars from 0 to a time; later traces cover earlier ones, so that each shows what comes after the next."""
    trace = _points(drawn, [value.raw for value in values], values, texts)
    return {
        **trace,
        "type": "bar",
        "orientation": "h",
        "y": list(y),
        "marker": {"pattern": _pattern(place)},
        "meta": {**trace["meta"], "exact": "x"},
    }


def _pattern(place: int) -> dict[str, Any]:
    return {"shape": PATTERNS[place % len(PATTERNS)], "size": 7, "solidity": 0.25}


def _points(drawn: Entry, x: Sequence[Any], values: Sequence[Value], texts: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": drawn.name,
        "x": list(x),
        "y": [value.raw for value in values],
        "customdata": [value.pointer for value in values],
        "hovertext": list(texts),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
        "meta": {"series": drawn.series, "exact": "y"},
    }


SECONDS = {"tickformat": "~s", "ticksuffix": "s"}
BYTES_PER_S = {"tickformat": "~s", "ticksuffix": "B/s"}
PERCENT = {"tickformat": ".0~%"}
CATEGORY = {"type": "category"}
FROM_ZERO = {"rangemode": "tozero"}


TICKS_MAX = 9
"""More than this on a logarithmic axis run into each other; whole decades then have to do."""


_DIGITS = (tuple(tenth / 10 for tenth in range(10, 100, 2)), (1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1,))


def axis_of_each(
    choices: Iterable[Sequence[int]], drawn: Sequence[dict[str, Any]], name: str, kind: str, base: dict[str, Any]
) -> tuple[dict[str, Any], ...]:
    """The logarithmic axis `name` (x or y) of each choice of traces, over what `base` says of that axis."""
    key = f"{name}axis"
    chosen = ([drawn[place] for place in choice] for choice in choices)
    return tuple({key: {**base[key], **log_axis(traces, name, kind)}} for traces in chosen)


def log_axis(drawn: Sequence[dict[str, Any]], axis: str, kind: str) -> dict[str, Any]:
    """A logarithmic axis over all traces, with as many round ticks in each decade as it has room for."""
    values = [value for trace in drawn for value in trace[axis] if isinstance(value, (int, float)) and value > 0]
    if not values:
        return {"type": "log"}
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    for digits in _DIGITS:
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if min(values) * 0.93 <= tick <= max(values) * 1.07]
        if len(ticks) <= TICKS_MAX:
            break
    return {"type": "log", "tickvals": ticks, "ticktext": [_TICKS[kind](tick) for tick in ticks]}


def _seconds(value: float) -> str:
    unit, scale = ("s", 1.0) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("us", 1e6)
    return f"{value * scale:,.10g} {unit}"


def _bytes(value: float) -> str:
    unit, scale = next(((u, s) for u, s in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if value >= s), ("kB", 1e3))
    return f"{value / scale:,.10g} {unit}"


_TICKS: dict[str, Callable[[float], str]] = {
    "seconds": _seconds,
    "bytes": _bytes,
    "usd": lambda value: f"${value:,.10g}",
    "share": lambda value: f"{value * 100:.10g}%",
    "nodes": lambda value: f"{value:.10g}",
}


def layout(x_title: str, x: dict[str, Any], y_title: str, y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Axes with their titles; zooming by mouse is off, so that a phone can scroll over a chart."""
    return {
        "xaxis": {"title": {"text": x_title}, "fixedrange": True, "automargin": True, **x},
        "yaxis": {"title": {"text": y_title}, "fixedrange": True, "automargin": True, **y},
        **more,
    }
