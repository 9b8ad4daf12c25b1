"""What the configuration of every connector has in common: the keys it knows, and a deadline."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from rewarm.errors import ConfigError
from rewarm.units import parse_duration

DEADLINE_S = 10.0
"""A load without a verdict after this is a miss: a context of ordinary length is computed in less."""


def check_names(options: Mapping[str, Any], known: Sequence[str], owner: str, also: Sequence[str] = ()) -> None:
    """Raise `ConfigError` for an option of `owner` that is neither known nor one of `also`, which no hint names."""
    for name in options:
        if name not in known and name not in also:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r} of {owner}; {hint}")
    if not options.get("url"):
        raise ConfigError(f'{owner} needs "url", for example "file:///mnt/nvme0/kv?capacity=2TiB"')


def deadline_of(options: Mapping[str, Any]) -> float:
    """Seconds that a load may take. Raises `ConfigError` unless above 0."""
    seconds = parse_duration(options.get("deadline", DEADLINE_S))
    if seconds <= 0:
        raise ConfigError(f"deadline must be above 0, got {options['deadline']!r}")
    return seconds
