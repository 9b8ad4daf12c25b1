"""Which releases of LMCache the adapter fits, and which one is here. Imports no LMCache."""

from __future__ import annotations

import re

from rewarm.connectors.common import version_of
from rewarm.errors import ConfigError

SUPPORTED = ("0.5.6", "0.5.7")
"""Releases whose adapter interface is implemented, with their candidates; oldest first."""


def installed_version() -> str | None:
    """The version of LMCache in this environment, None without one."""
    return version_of("lmcache")


def release_of(version: str | None) -> str:
    """The supported release that a version belongs to ("0.5.7rc2" to "0.5.7"). Raises `ConfigError` with the list."""
    match = re.match(r"\d+\.\d+\.\d+", version or "")
    if match is None or match[0] not in SUPPORTED:
        here = f"LMCache {version} is not supported" if version else "LMCache is not installed here"
        raise ConfigError(f"{here}; this Rewarm knows {', '.join(SUPPORTED)}")
    return match[0]
