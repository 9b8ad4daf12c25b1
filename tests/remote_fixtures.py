"""Fixtures of suites whose engine has an environment of its own: processes there that run the suite's `worker.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.remote import ROOT, Remote


def environment_of(suite: Path) -> Path:
    """The environment that `make SUITE-env` makes."""
    return ROOT / f".venv-{suite.name}"


def remote_fixtures(suite: Path) -> tuple[Any, Any, Any]:
    """`start`, `worker` and `second` for the suite in a directory, for its conftest."""

    @pytest.fixture(scope="session")
    def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Remote]]:
        """Starts a process of its own. Without the environment all is skipped, and says so."""
        python = environment_of(suite) / "bin" / "python"
        if not python.exists():
            pytest.skip(f"no environment at {environment_of(suite)}: run `make {suite.name}-env`")
        made: list[Remote] = []

        def make() -> Remote:
            made.append(Remote(python, suite / "worker.py", tmp_path_factory.mktemp("log") / "worker"))
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
        """A process that has stored nothing itself: what it restores, it read from the medium."""
        return start()

    return start, worker, second


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An empty pool."""
    (tmp_path / "pool").mkdir()
    return f"file://{tmp_path / 'pool'}?capacity=256MiB"
