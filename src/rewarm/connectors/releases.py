"""Which release of an engine is here, and whether a connector fits it. Imports no engine."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

from rewarm.errors import ConfigError


def installed(distribution: str) -> str | None:
    """The version of a distribution in this environment, None without one."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(version: str | None, engine: str, supported: Sequence[str]) -> str:
    """The supported release that a version belongs to: "0.5.7rc2" to "0.5.7", or to "0.5" where those are told apart.

    Raises `ConfigError` with the list.
    """
    for release in supported:
        if re.match(rf"{re.escape(release)}(?!\d)", version or ""):
            return release
    here = f"{engine} {version} is not supported" if version else f"{engine} is not installed here"
    raise ConfigError(f"{here}; this Rewarm knows {', '.join(supported)}")
