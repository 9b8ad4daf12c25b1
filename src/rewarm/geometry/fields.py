"""Reads a Hugging Face `config.json` and its fields strictly: every refusal names the file and the field.

A file from a stranger costs bounded memory and time; a value of the wrong type or an absurd size is a `ConfigError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarm.errors import ConfigError

CONFIG_BYTES_MAX = 4 << 20
"""Published configurations are a few KiB; the largest, with per-layer quantisation lists, stay under 1 MiB."""
COUNT_MAX = 1 << 24
"""No published dimension, count or vocabulary comes near; above it is a damaged file."""
LAYERS_MAX = 4096
HEADS_MAX = 4096
HEAD_DIM_MAX = 8192
EXPERTS_MAX = 1 << 16
TOKENS_MAX = 1 << 31
"""Largest window or context; some configurations write a window of 2^31 - 1 for "none"."""


def read_config(path: Path) -> dict[str, Any]:
    """The object in `path`, a `config.json` or a directory that has one. Raises `ConfigError`."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} is missing or no regular file")
    try:
        with file.open("rb") as stream:
            raw = stream.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{file} is larger than {CONFIG_BYTES_MAX} bytes; not a model configuration")
    return parse_json_object(raw, str(file))


def parse_json_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object without duplicate names, NaN or infinities. Raises `ConfigError` naming `where`."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} occurs twice")
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Fields:
    """Typed access to the fields of one configuration. null and absent are the same, as in `transformers`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def says_null(self, name: str) -> bool:
        """True when the file has the field as null: a few classes assume a value only where it is absent."""
        return name in self._values and self._values[name] is None

    def refuse(self, name: str, why: str) -> ConfigError:
        """The error for a field; the caller raises it."""
        return ConfigError(f"{self.where}: {name} {why}")

    def count(self, name: str, most: int = COUNT_MAX, least: int = 1) -> int:
        """A whole number from `least` to `most`; refused when absent."""
        value = self._values.get(name)
        if value is None:
            raise self.refuse(name, "is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be a whole number, got {value!r}")
        if not least <= value <= most:
            raise self.refuse(name, f"must be from {least} to {most}, got {value}")
        return value

    def count_or(self, name: str, default: int, most: int = COUNT_MAX, least: int = 1) -> int:
        """The same with a default for an absent field."""
        return self.count(name, most, least) if name in self else default

    def maybe(self, *names: str, most: int = COUNT_MAX, least: int = 1) -> int | None:
        """The first of `names` that is present, or None."""
        return next((self.count(name, most, least) for name in names if name in self), None)

    def flag(self, name: str, default: bool) -> bool:
        """True or false, with a default."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, got {value!r}")
        return value

    def text(self, name: str) -> str | None:
        """A string, or None when absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, f"must be a string, got {value!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "must be a list of strings")
        return tuple(value)

    def indexes(self, name: str, below: int) -> frozenset[int]:
        """A list of layer indexes, each from 0 to `below` - 1; empty when absent."""
        value = self._values.get(name)
        if value is None:
            return frozenset()
        good = isinstance(value, list) and all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < below for item in value
        )
        if not good:
            raise self.refuse(name, f"must be a list of layer indexes below {below}, got {value!r}")
        return frozenset(value)

    def nested(self, name: str) -> Fields | None:
        """The fields of an object inside, or None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, f"must be an object, got {value!r}")
        return Fields(value, f"{self.where}: {name}")


def rope_types(value: Any) -> list[str]:
    """Every `rope_type` (formerly `type`) of a configuration, wherever it stands."""
    if not isinstance(value, Mapping):
        return []
    own = value.get("rope_type", value.get("type")) if "rope_theta" in value or "rope_type" in value else None
    return [*([str(own)] if own else []), *(rope for item in value.values() for rope in rope_types(item))]
