"""Which releases of LMCache the adapter fits, and which one is here. Imports no LMCache."""

from __future__ import annotations

from rewarm.connectors import releases

SUPPORTED = ("0.5.6", "0.5.7")
"""Releases whose adapter interface is implemented, with their candidates; oldest first."""


def installed_version() -> str | None:
    """The version of LMCache in this environment, None without one."""
    return releases.installed("lmcache")


def release_of(version: str | None) -> str:
    """The supported release that a version belongs to ("0.5.7rc2" to "0.5.7"). Raises `ConfigError` with the list."""
    return releases.release_of(version, "LMCache", SUPPORTED)
