"""Fixtures of the Transformers tests. Skipped, and said so, without `make transformers-env`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.transformers.remote import ROOT, Remote

ENVIRONMENT = ROOT / ".venv-transformers"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Remote]]:
    """Starts a process of its own."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment at {ENVIRONMENT}: run `make transformers-env`")
    made: list[Remote] = []

    def make() -> Remote:
        made.append(Remote(python, Path(__file__).with_name("worker.py"), tmp_path_factory.mktemp("log") / "worker"))
        return made[-1]

    yield make
    for remote in made:
        remote.close()


@pytest.fixture(scope="session")
def worker(start: Callable[[], Remote]) -> Remote:
    """The process of most tests."""
    return start()


@pytest.fixture(scope="session")
def second(start: Callable[[], Remote]) -> Remote:
    """A process that has kept nothing itself: what it restores, it read from the medium."""
    return start()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty pool."""
    (tmp_path / "pool").mkdir()
    return f"file://{tmp_path / 'pool'}?capacity=256MiB"


def prompt(seed: int, tokens: int = 333) -> list[int]:
    """Tokens of a context that no other seed shares."""
    dice = random.Random(seed)
    return [dice.randrange(3, 500) for _ in range(tokens)]
