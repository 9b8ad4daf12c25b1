"""Fixtures of the SGLang tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.remote_fixtures import environment_of, remote_fixtures, url

__all__ = ["ENVIRONMENT", "second", "start", "url", "worker"]

SUITE = Path(__file__).parent
ENVIRONMENT = environment_of(SUITE)
start, worker, second = remote_fixtures(SUITE)


def keys(count: int, tag: str = "") -> list[str]:
    """Page hashes as SGLang makes them: hex digits of SHA-256."""
    return [hashlib.sha256(f"{tag}/{number}".encode()).hexdigest() for number in range(count)]
