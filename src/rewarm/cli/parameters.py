"""Types of arguments: sizes, rates and durations as people write them, and the URL or path of a store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import click

from rewarm.errors import ConfigError
from rewarm.units import parse_duration, parse_rate, parse_size

CONFIG_SUFFIX = ".toml"
"""As `rewarm.tiers.opening` has it, which is too heavy for the help."""

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class UnitType(click.ParamType):  # type: ignore[type-arg]  # generic in recent versions of click only
    """A number with a unit; what cannot be read is a usage error that says what can."""

    def __init__(self, name: str, parse: Callable[[Any], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse one value of the command line."""
        try:
            return self._parse(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class UrlType(click.ParamType):  # type: ignore[type-arg]  # generic in recent versions of click only
    """The URL of a store; a plain path, with or without `?options`, becomes a `file:` URL."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the URL that a value of the command line means."""
        return as_url(str(value))


def as_url(text: str) -> str:
    """`/mnt/kv?capacity=2TiB` -> `file:///mnt/kv?capacity=2TiB`; what has a scheme stays as it is.

    The path of a configuration file stays a path.
    """
    if _SCHEME.match(text):
        return text
    if text.endswith(CONFIG_SUFFIX) and not os.path.isdir(text):
        return os.path.abspath(text)
    path, question, options = text.partition("?")
    return f"file://{quote(os.path.abspath(path))}{question}{options}"


SIZE = UnitType("size", parse_size)
RATE = UnitType("rate", parse_rate)
DURATION = UnitType("duration", parse_duration)
STORE_URL = UrlType()
