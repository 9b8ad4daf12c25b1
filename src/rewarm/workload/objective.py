"""An objective: one line such as `ttft_p90 <= 2 s` that a result meets or misses. Shared by jobs and `compare`.

It holds for every target and concurrency of a result. It measures nothing: whoever has the figure asks `met_by`.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable

import msgspec

from rewarm.errors import ConfigError
from rewarm.units import format_duration, format_rate, parse_duration, parse_rate

TIMES = ("ttft", "tpot", "e2e")
"""Figures with percentiles: time to first token, time per output token, time to the last token."""
PERCENTILES = ("p50", "p90", "p99")
_COUNTS = ("restored_tokens_per_s", "output_tokens_per_s")
_RATE = "read_bytes_per_s"

FIGURES = (*(f"{time}_{rank}" for time in TIMES for rank in PERCENTILES), *_COUNTS, _RATE)
"""Everything that an objective may name."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_LINE = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|<|>)\s*(.+?)\s*")


class Objective(msgspec.Struct, frozen=True):
    """`figure` compared with `limit`, in seconds, bytes per second or tokens per second."""

    figure: str
    comparison: str
    limit: float

    def met_by(self, value: float | None) -> bool:
        """Whether a figure meets it; None, a figure that could not be had, never does."""
        return value is not None and _OPERATORS[self.comparison](value, self.limit)

    def __str__(self) -> str:
        return f"{self.figure} {self.comparison} {format_figure(self.figure, self.limit)}"


def parse_objective(text: str) -> Objective:
    """Read `FIGURE <= VALUE` with a unit, or `<`, `>=`, `>`. Raises `ConfigError` with what is allowed."""
    match = _LINE.fullmatch(text)
    if not match:
        raise ConfigError(f"cannot read the objective {text!r}; write, for example, 'ttft_p90 <= 2 s'")
    figure, comparison, limit = match.groups()
    if figure not in FIGURES:
        near = difflib.get_close_matches(figure, FIGURES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(FIGURES)}"
        raise ConfigError(f"objective {text!r}: unknown figure {figure!r}; {hint}")
    return Objective(figure, comparison, _limit(figure, limit, text))


def format_figure(figure: str, value: float) -> str:
    """A value of a figure for people, with its unit."""
    if figure == _RATE:
        return format_rate(value)
    return f"{value:.0f} tokens/s" if figure in _COUNTS else format_duration(value)


def _limit(figure: str, value: str, text: str) -> float:
    if figure == _RATE:
        return parse_rate(value)
    if figure not in _COUNTS:
        return parse_duration(value)
    number = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:tokens/s)?", value)
    if not number:
        raise ConfigError(f"objective {text!r}: {figure} is compared with a number of tokens a second")
    return float(number[1])
