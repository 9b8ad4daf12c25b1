"""The Python of the README runs as it stands, and its commands are those that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rewarm.cli.group import VERBS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_example_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert "file:///tmp/kv?capacity=1GiB" in example
    names: dict[str, Any] = {}
    exec(example.replace("/tmp/kv", str(tmp_path)), names)
    assert names["ok"] == [True] * 4
    assert (names["buffers"] == names["blocks"]).all()


def test_it_lists_the_verbs_that_exist() -> None:
    assert sorted(re.findall(r"^\| `rewarm (\w+)", README, re.MULTILINE)) == sorted(VERBS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_make_targets_of_the_documents_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    suites = re.search(r"^SUITES\s*:=(.*)$", makefile, re.MULTILINE)
    assert suites
    targets = {*re.findall(r"^([a-z-]+):", makefile, re.MULTILINE), *(f"test-{suite}" for suite in suites[1].split())}
    named = set(re.findall(r"\bmake ([a-z-]+)\s{2,}|`make ([a-z-]+)`", (ROOT / page).read_text()))
    assert named
    assert {first or second for first, second in named} <= targets
