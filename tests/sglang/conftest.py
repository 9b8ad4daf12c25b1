"""Fixtures of the SGLang tests. Skipped, and said so, without the environment of `make sglang-env`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.transformers.remote import ROOT, Remote

ENVIRONMENT = ROOT / ".venv-sglang"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Remote]]:
    """Starts a process of its own."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment at {ENVIRONMENT}: run `make sglang-env`")
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
    """A process that has stored nothing itself."""
    return start()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty pool."""
    (tmp_path / "pool").mkdir()
    return f"file://{tmp_path / 'pool'}?capacity=256MiB"


def keys(count: int, tag: str = "") -> list[str]:
    """Page hashes as SGLang makes them: hex digits of SHA-256."""
    return [hashlib.sha256(f"{tag}/{number}".encode()).hexdigest() for number in range(count)]
