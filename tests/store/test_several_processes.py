"""Several processes on one pool: each sees what others published, a death costs nothing that was published."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.neighbour import Neighbour

from rewarm.store.inspection import inspect_pool

CAPACITY = 16 << 20
SIZE = 60_000
PROCESSES = 3


@pytest.fixture
def neighbours(tmp_path: Path) -> Iterator[list[Neighbour]]:
    url = f"file://{tmp_path}?capacity={CAPACITY}&poll=1h"
    started = [Neighbour(url) for _ in range(PROCESSES)]
    with contextlib.ExitStack() as closing:
        yield [closing.enter_context(one) for one in started]


def used(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (root / "writers").rglob("*") if path.is_file())


def test_each_sees_what_the_others_published(neighbours: list[Neighbour]) -> None:
    for one in neighbours:
        one.begin(f"save {neighbours.index(one)} 20 {SIZE}")
    assert [one.answer() for one in neighbours] == ["stored=20"] * PROCESSES
    for one in neighbours:
        one.begin("refresh")
    assert [one.answer() for one in neighbours] == ["None"] * PROCESSES
    for one in neighbours:
        for tag in range(PROCESSES):
            one.begin(f"load {tag} 20 {SIZE}")
            assert one.answer() == "hit=20"
            assert one.ask(f"save {tag} 20 {SIZE}") == "already=20"
    assert neighbours[0].ask("check") == "True"


def test_the_same_keys_saved_at_once_by_all(neighbours: list[Neighbour]) -> None:
    for one in neighbours:
        one.begin(f"save same 40 {SIZE}")
    assert {one.answer() for one in neighbours} == {"stored=40"}
    for one in neighbours:
        one.ask("refresh")
        assert one.ask(f"load same 40 {SIZE}") == "hit=40"


def test_who_evicts_or_erases_while_others_load_serves_no_wrong_byte(
    neighbours: list[Neighbour], tmp_path: Path
) -> None:
    saver, loader, remover = neighbours
    assert saver.ask(f"save kept 60 {SIZE}") == "stored=60"
    assert loader.ask("refresh") == remover.ask("refresh") == "None"
    loader.begin(f"load kept 60 {SIZE}")
    assert remover.ask(f"evict {CAPACITY // 8}") == "True"
    assert "WRONG" not in loader.answer()
    loader.ask("refresh")
    left = loader.ask("held kept 60")
    assert int(left) < 60
    assert loader.ask(f"load kept 60 {SIZE}").startswith(f"hit={left} ")
    saver.begin(f"save more 20 {SIZE}")
    assert remover.ask("erase") in ("True", "False")
    saver.answer()
    assert remover.ask("held kept 60") == "0"
    for one in neighbours:
        one.ask("refresh")
        assert one.ask("held kept 60") == "0"
    assert saver.ask(f"save again 20 {SIZE}") == "stored=20", "a living writer goes on in new files"
    loader.ask("refresh")
    assert loader.ask(f"load again 20 {SIZE}") == "hit=20"
    assert used(tmp_path) <= CAPACITY


def test_segments_of_the_killed_are_served_and_evicted(neighbours: list[Neighbour], tmp_path: Path) -> None:
    killed, living, last = neighbours
    assert killed.ask(f"save killed 100 {SIZE}") == "stored=100"
    assert living.ask(f"save living 60 {SIZE}") == "stored=60"
    killed.kill()
    assert sorted(writer.alive for writer in inspect_pool(tmp_path).writers) == [False, True]
    last.ask("refresh")
    assert last.ask(f"load killed 100 {SIZE}") == "hit=100"
    for turn in range(10):
        assert last.ask(f"save {turn} 20 {SIZE}") == "stored=20"
        assert used(tmp_path) <= CAPACITY
    assert int(last.ask("held killed 100")) <= 25, "but for a quarter of what was read"
    assert last.ask("refresh") == "None"
    held = int(last.ask("held living 60"))
    assert held >= 2, "the segment that it fills stays"
    assert last.ask(f"load living 60 {SIZE}").startswith(f"hit={held}")
    assert last.ask("check") == "True"
