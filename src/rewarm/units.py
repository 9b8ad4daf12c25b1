"""Sizes, rates and durations as people write them. Binary units are powers of 1024, decimal ones powers of 1000.

Parsing accepts a number that is finite and not negative, with a unit; everything else is a `ConfigError` that says
what would be right. Formatting is for people and rounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from rewarm.errors import ConfigError

SIZE_MAX = 1 << 63
"""Offsets of files are signed 64-bit numbers: a size beyond is a slip of the pen."""

_SIZE = {"": 1, "B": 1}
_SIZE |= {f"{p}iB": 1024**i for i, p in enumerate("KMGTPE", start=1)}
_SIZE |= {f"{p}B": 1000**i for i, p in enumerate("KMGTPE", start=1)} | {"kB": 1000}
_BIT = {"b": 1} | {f"{p}b": 1000**i for i, p in enumerate("KMGTPE", start=1)} | {"kb": 1000}
_TIME = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z]*)(/s)?\s*")
_EXAMPLE = {"a size": "'2TiB' or '500GB'", "a rate": "'6.9GB/s' or '100Gb/s'", "a duration": "'1.5s' or '50ms'"}


def parse_size(text: str | int) -> int:
    """Bytes from "2TiB", "500GB", "4096", exactly. Raises `ConfigError` with what is allowed."""
    if isinstance(text, int):
        return int(_checked(text, "a size"))
    number, unit, per_second = _split(text, "a size")
    if per_second:
        raise ConfigError(f"{text!r} is a rate; a size has no '/s'")
    size = number * int(_unit(text, unit, _SIZE, "a size"))
    if unit in ("", "B") and size.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number of bytes")
    if size >= SIZE_MAX:
        raise ConfigError(f"{text!r} is larger than any file can be")
    return int(size)


def parse_rate(text: str | float) -> float:
    """Bytes per second from "6.9GB/s" (bytes) or "100Gb/s" (bits). Raises `ConfigError`."""
    if isinstance(text, (int, float)):
        return _checked(text, "a rate")
    number, unit, _ = _split(text, "a rate")
    if unit in _BIT:
        return float(number * _BIT[unit] / 8)
    return float(number) * _unit(text, unit, _SIZE, "a rate")


def parse_duration(text: str | float) -> float:
    """Seconds from "1.5s", "50ms", "2h" or a plain number. Raises `ConfigError`."""
    if isinstance(text, (int, float)):
        return _checked(text, "a duration")
    number, unit, per_second = _split(text, "a duration")
    if per_second:
        raise ConfigError(f"{text!r} is a rate; a duration has no '/s'")
    return float(number) * _unit(text, unit, _TIME, "a duration")


def _checked(number: float, what: str) -> float:
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{number!r} is not {what}; it must be finite and not negative")
    return number


def _split(text: str, what: str) -> tuple[Fraction, str, bool]:
    match = _NUMBER.fullmatch(text)
    if not match:
        raise ConfigError(f"cannot read {text!r} as {what}; write a number and a unit, for example {_EXAMPLE[what]}")
    return Fraction(match[1]), match[2], bool(match[3])


def _unit(text: str, unit: str, table: Mapping[str, float], what: str) -> float:
    if unit in table:
        return table[unit]
    near = [known for known in table if known.casefold() == unit.casefold()]
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(u for u in table if u)}"
    raise ConfigError(f"unknown unit {unit!r} in {text!r} for {what}; {hint}")


def format_size(count: float) -> str:
    """Binary size for people: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(count) < 1024 or unit == "PiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def format_rate(bytes_per_s: float) -> str:
    """Decimal rate for people: 6.94e9 -> '6.94 GB/s'."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.2f} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def format_duration(seconds: float) -> str:
    """Duration for people: 0.0123 -> '12.3 ms'."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
