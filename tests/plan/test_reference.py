"""docs/reference/plan-toml.md names every key of a plan file and every part of the answer, and its example works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rewarm.plan import Plan, make_plan, parse_plan
from rewarm.plan.spec import SECTIONS, PlanSpec

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "reference" / "plan-toml.md").read_text()


def keys(section: str) -> set[str]:
    """Words in backticks in the part of the page about one section."""
    found = re.search(rf"^## `\[+{section}\]+`.*?(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"no part about [{section}]"
    return set(re.findall(r"`([^`]+)`", found[0]))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_documented(section: str) -> None:
    assert set(SECTIONS[section].__struct_fields__) <= keys(section)


def test_top_level_and_answer_are_documented() -> None:
    top = set(re.findall(r"`\[*([a-z_]+)\]*`", PAGE))
    assert set(PlanSpec.__struct_fields__) <= top
    described = set(Plan.__struct_fields__) - {
        "schema", "version", "model", "bytes_per_token", "context_tokens", "context_bytes", "notes",
    }  # fmt: skip
    assert described <= top


@pytest.mark.scale
def test_the_small_file_of_the_guide_is_a_plan() -> None:
    text = (DOCS / "guides" / "planning.md").read_text()
    found = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert found
    spec = parse_plan(found[1].replace("[1, 2]", "[1]"))
    assert make_plan(spec).verdict.sentence
