"""A directory whose reads the kernel counts, and what every test of the benchmark needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from rewarm.bench.cold import try_counting
from rewarm.bench.medium import medium_of


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """A directory on a medium whose reads the kernel counts, process and device."""
    counting = try_counting(tmp_path, medium_of(tmp_path))
    if not (counting.process and counting.device):
        pytest.skip(f"cold reads cannot be proven in {tmp_path}: {counting.reason or 'diskstats does not move'}")
    return tmp_path


class Stage:
    """A stage that remembers what it was told."""

    def __init__(self) -> None:
        self.labels: list[tuple[str, float]] = []
        self.done = 0.0

    def __call__(self, label: str, total: float) -> AbstractContextManager[Stage]:
        self.labels.append((label, total))
        return self._open()

    def advance(self, amount: float = 1) -> None:
        self.done += amount

    @contextmanager
    def _open(self) -> Iterator[Stage]:
        yield self


@pytest.fixture
def stage() -> Stage:
    return Stage()
