"""The verbs on a raw pool, as a user types them: format, inspect, check, evict, erase; what cannot be is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.store.raw.devices import make_file, open_as

from rewarm.cli.group import main
from rewarm.testing.kit.base import save
from rewarm.testing.payload import make_keys

FAST = "poll=20ms&lease=6s"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = make_file(tmp_path / "device", 4 << 20)
    with open_as(path, "", "&role=owner") as store:
        save(store, make_keys(40), 16 << 10)
        store.flush()
    return path


def test_format_says_what_it_made_and_refuses_twice(tmp_path: Path) -> None:
    path = tmp_path / "device"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    made = json.loads(run("format", f"block://{path}", "--json").stdout)
    assert made["slots"] >= 32
    again = run("format", f"block://{path}")
    assert again.exit_code == 2
    assert "--force" in again.output
    assert run("format", str(tmp_path)).exit_code == 2
    assert run("format", f"block://{path}?poll=1s").exit_code == 2


def test_verbs_look_after_a_raw_pool(device: Path) -> None:
    url = f"block://{device}?{FAST}"
    shown = json.loads(run("inspect", url, "--json").stdout)
    assert shown["blocks"] == 40
    assert not shown["owner"]
    assert run("check", url).exit_code == 0
    (digest,) = shown["namespaces"]
    assert run("evict", url, "--to", "50%").exit_code == 0
    assert run("erase", url, "--namespace", digest[:12], "--yes").exit_code == 0
    assert json.loads(run("inspect", url, "--json").stdout)["blocks"] == 0


def test_metrics_refuses_clearly(device: Path) -> None:
    answer = run("metrics", f"block://{device}")
    assert answer.exit_code == 2
    assert "does not read raw pools" in answer.output
