"""Fixtures of the LMCache tests. Without the environment of `make lmcache-env` they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lmcache.servers import ENVIRONMENT, VERSIONS, Host


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Host]]:
    """Both versions of LMCache, imported once for all tests, at the same time."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"no LMCache environment at {ENVIRONMENT}: run `make lmcache-env`")
    made = {version: Host(tmp_path_factory.mktemp("lmcache"), version) for version in VERSIONS}
    yield made
    for host in made.values():
        host.close()


@pytest.fixture(params=VERSIONS)
def host(request: pytest.FixtureRequest, hosts: dict[str, Host]) -> Host:
    """Each version in turn."""
    return hosts[request.param]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """An empty directory for a pool."""
    path = tmp_path / "pool"
    path.mkdir()
    return path
