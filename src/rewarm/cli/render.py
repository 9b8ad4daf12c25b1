"""Structs as text: fields in two columns, lists of structs as tables. The unit comes from the name of a field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rewarm.units import format_duration, format_rate, format_size


def print_struct(console: Console, value: msgspec.Struct) -> None:
    """Print every field: plain ones first, then one table for each list of structs that is not empty."""
    fields = msgspec.structs.asdict(value)
    plain = Table.grid(padding=(0, 2))
    tables = {}
    for name, content in fields.items():
        if _is_table(content):
            tables[name] = content
        else:
            plain.add_row(heading(name), Text(cell(name, content)))
    console.print(plain)
    for name, rows in tables.items():
        console.print()
        print_table(console, heading(name), rows)


def print_table(console: Console, title: str, rows: Sequence[msgspec.Struct]) -> None:
    """Print structs of one type as a table, a row each; an empty list prints nothing."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = rows[0].__struct_fields__
    for name in names:
        number = isinstance(getattr(rows[0], name), (int, float)) and not isinstance(getattr(rows[0], name), bool)
        table.add_column(heading(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(name, getattr(row, name))) for name in names))
    console.print(table)


def heading(name: str) -> str:
    """The name of a field as a heading, without its unit: `used_bytes` -> `used`."""
    for suffix in ("_bytes_per_s", "_bytes", "_s"):
        name = name.removesuffix(suffix)
    return name.removeprefix("bytes_").replace("_", " ")


def cell(name: str, value: Any) -> str:
    """The value of a field as text, in the unit that its name ends in."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(name, item)}" for key, item in value.items()) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(cell(name, item) for item in value) or "-"
    if isinstance(value, (int, float)):
        return _number(name, value)
    return str(value)


def _number(name: str, value: float) -> str:
    if name.endswith("_per_s"):
        return format_rate(value)
    if name.endswith("_bytes") or name.startswith("bytes_"):
        return format_size(value)
    if name.endswith("_s"):
        return format_duration(value)
    return f"{value:,}"


def _is_table(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], msgspec.Struct)
