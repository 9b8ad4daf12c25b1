"""Reads a plan file: strict TOML with units. `parse_plan` gives a checked `PlanSpec`, or says what is wrong and where.

An unknown key, a wrong type or a value that cannot be raises `ConfigError` with the field's name and what is allowed.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rewarm.errors import ConfigError
from rewarm.plan.checks import check_spec
from rewarm.plan.spec import SECTIONS, PlanSpec
from rewarm.units import parse_duration, parse_rate, parse_size

_RATES = {
    "drive_read",
    "drive_write",
    "link",
    "node_link",
    "host_copy",
    "reader",
    "effective_read",
    "dram_read",
    "hbm_read",
}
_SIZES = {"capacity", "dram", "staging"}
_DURATIONS = {"fixed_time", "client_time", "think_time", "ttft_p50", "ttft_p90", "ttft_p99"}


def parse_plan(text: str, where: str = "plan") -> PlanSpec:
    """A checked spec from TOML text; `where` names its source in errors."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from error
    return make_spec(table, where)


def make_spec(table: Mapping[str, Any], where: str = "plan") -> PlanSpec:
    """A checked spec from plain values."""
    _check_keys(table, PlanSpec.__struct_fields__, where, "")
    plain = {name: _section(value, name, where) for name, value in table.items()}
    try:
        spec = msgspec.convert(plain, PlanSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_named(str(error))}") from error
    check_spec(spec, where)
    return spec


def _section(value: Any, name: str, where: str) -> Any:
    struct = SECTIONS.get(name)
    if struct is None:
        return value
    if name == "medium":
        if not isinstance(value, list):
            raise ConfigError(f"{where}: media are written as [[medium]], one table for each")
        return [_table(entry, struct, f"medium[{index}]", where) for index, entry in enumerate(value)]
    return _table(value, struct, name, where)


def _table(value: Any, struct: type[msgspec.Struct], path: str, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {path} is a table")
    _check_keys(value, struct.__struct_fields__, where, path)
    return {key: _quantity(key, entry, f"{where}: {path}.{key}") for key, entry in value.items()}


def _quantity(key: str, value: Any, where: str) -> Any:
    """Numbers from the units people write; everything else as it is."""
    try:
        if key == "tpot" and isinstance(value, Mapping):
            return {str(name): parse_duration(entry) for name, entry in value.items()}
        if isinstance(value, str):
            if key in _RATES:
                return parse_rate(value)
            if key in _SIZES:
                return float(parse_size(value))
            if key in _DURATIONS:
                return parse_duration(value)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    return value


def _check_keys(table: Mapping[str, Any], known: Iterable[str], where: str, path: str) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key '{path + '.' if path else ''}{key}'; {hint}")


def _named(message: str) -> str:
    """msgspec writes `... - at `$.engine.gpus``: put the field first."""
    text, at, path = message.partition(" - at `$")
    return f"{path.strip('`.') or 'plan'}: {text}" if at else message
