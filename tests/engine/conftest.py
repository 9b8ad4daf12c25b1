"""Fixtures of the engine tests. Without the environment of `make engine-env` they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.engines import ENVIRONMENT, Engine, Host


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """Every version of vLLM, imported once for all tests, at the same time."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no engine environment at {ENVIRONMENT}: run `make engine-env`")
    made = {version: Host(tmp_path_factory.mktemp("vllm"), version) for version in ("0.32", "0.31")}
    yield made
    for host in made.values():
        host.close()


@pytest.fixture(scope="session")
def host(hosts: dict[str, Host]) -> Host:
    """vLLM 0.32."""
    return hosts["0.32"]


@pytest.fixture(scope="session")
def older_host(hosts: dict[str, Host]) -> Host:
    """vLLM 0.31."""
    return hosts["0.31"]


@pytest.fixture(scope="session")
def make_model(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a model with random weights; the same directory may be written twice."""

    def make(path: Path | None = None, **options: object) -> Path:
        where = path or tmp_path_factory.mktemp("model")
        maker = host.engine()
        maker.ask("make_model", path=str(where), **options)
        maker.close()
        return where

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Path]) -> Path:
    """The model of most tests."""
    return make_model()


@pytest.fixture(scope="session")
def recompute(host: Host, model: Path) -> Iterator[Engine]:
    """An engine without a connector: what it answers is right."""
    engine = host.engine().start(model)
    yield engine
    engine.close()


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An empty directory for a pool."""
    path = tmp_path / "pool"
    path.mkdir()
    return path


@pytest.fixture
def new_engine(host: Host) -> Iterator[Callable[[], Engine]]:
    """Makes engines that end with the test."""
    made: list[Engine] = []

    def make() -> Engine:
        made.append(host.engine())
        return made[-1]

    yield make
    for engine in made:
        engine.close()
