"""What an eviction asks of the file system: calls per victim, which cost the most on a network mount."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from tests.store.test_eviction import STORED, open_pool, save

from rewarm.store import pool as pool_module
from rewarm.store.pool import FileFacts
from rewarm.testing import make_keys


def test_between_two_victims_nobody_looks_at_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    facts_of = pool_module._facts_of

    def looked_at(writer: str, entry: os.DirEntry[str]) -> FileFacts | None:
        looks.append(entry.name)
        return facts_of(writer, entry)

    keys = make_keys(80)
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(open_pool(tmp_path)) for _ in range(5)]
        for i, other in enumerate(others):
            assert save(other, keys[16 * i : 16 * (i + 1)]) == [STORED] * 16
        evictor = stack.enter_context(open_pool(tmp_path))
        evictor.refresh()
        assert save(evictor, make_keys(1, "own")) == [STORED]
        monkeypatch.setattr(pool_module, "_facts_of", looked_at)
        evictor.evict(0)
        gone = evictor.stats().evicted_segments
    files = 5 * (4 + 1) + 2
    assert gone >= 15
    assert len(looks) <= 4 * files + 2 * gone, "every file was looked at for every victim"
