"""The protocol in the small, every interleaving of it: it holds with all rules, and breaks without any one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.store.model.explorer import Actor, Found, Scene, State, explore
from tests.store.model.lives import adoption, lease, whole
from tests.store.model.room import erasing, eviction, quota
from tests.store.model.scenes import SCENES
from tests.store.model.world import RULES

ALL = frozenset(RULES)
EVERY_SCENE = (*SCENES, quota, erasing, eviction, lease, adoption)
"""The smallest first: what finds the break of a rule ends the search."""
PROTOCOL = Path(__file__).resolve().parents[3] / "docs" / "reference" / "protocol-1.md"


@pytest.mark.parametrize("scene", EVERY_SCENE, ids=lambda scene: scene.__name__)
def test_nothing_goes_wrong_under_all_rules(scene: object) -> None:
    found = explore(scene(ALL))  # type: ignore[operator]
    assert found.wrong is None, found.trace
    assert found.rests > 0, "nothing ever comes to rest"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(rule: str) -> None:
    assert any(explore(scene(ALL - {rule})).wrong for scene in EVERY_SCENE), (
        f"nothing breaks without rule {rule}: {RULES[rule]}"
    )


def test_the_model_has_every_rule_of_the_page() -> None:
    numbers = set(re.findall(r"^(\d+)\. \*\*", PROTOCOL.read_text(), re.MULTILINE))
    assert numbers == {re.sub(r"\D", "", rule) for rule in RULES}


@pytest.mark.crash
def test_two_writers_an_evictor_and_a_reader_together() -> None:
    found = explore(whole(ALL))
    assert found.wrong is None, found.trace
    print(f"{found.states:,} states, {found.rests:,} of them at rest")
    assert found.states > 100_000


def test_the_explorer_visits_every_interleaving_and_death() -> None:
    def note(name: str) -> object:
        def step(state: State) -> None:
            state["order"] += name

        return step

    def run(*actors: Actor) -> Found:
        ends: set[str] = set()

        def collect(state: State) -> None:
            ends.add(state["order"])

        found = explore(Scene(actors, {"order": ""}, at_rest=[collect]))
        found.trace = sorted(ends)
        return found

    x = Actor("x", [note("x"), note("X")])  # type: ignore[list-item]
    y = Actor("y", [note("y")])  # type: ignore[list-item]
    assert run(x, y).trace == ["xXy", "xyX", "yxX"]
    mortal = Actor("y", [note("y")], may_die=True)  # type: ignore[list-item]
    assert run(x, mortal).trace == ["xX", "xXy", "xyX", "yxX"]
