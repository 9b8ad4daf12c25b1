"""Fixtures of the Transformers tests."""

from __future__ import annotations

import random
from pathlib import Path

from tests.remote_fixtures import environment_of, remote_fixtures, url

__all__ = ["ENVIRONMENT", "second", "start", "url", "worker"]

SUITE = Path(__file__).parent
ENVIRONMENT = environment_of(SUITE)
start, worker, second = remote_fixtures(SUITE)


def prompt(seed: int, tokens: int = 333) -> list[int]:
    """Tokens of a context that no other seed shares."""
    dice = random.Random(seed)
    return [dice.randrange(3, 500) for _ in range(tokens)]
