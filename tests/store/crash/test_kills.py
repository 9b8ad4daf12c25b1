"""Writers killed with SIGKILL at random moments: what was promised is there, nothing is wrong, the pool stays clean."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lengths import repeated
from tests.store.crash.lives import NAMESPACE, batch_keys, block, live_and_die, load, server

from rewarm.store.contract import Store
from rewarm.store.opening import open_store

pytestmark = pytest.mark.crash

LIVES = repeated(60, 200)
LIVES_WITH_EVICTION = repeated(20, 50)
KNOWN_MAX = 500
"""Blocks read after each life: those that fit, and as many that may be gone."""

CHECK_EVERY = 25
"""A check reads every block of the pool; between checks the new ones are read."""


def _must_be_clean(store: Store) -> None:
    report = store.check()
    assert report.clean, report.findings


def test_kills_lose_nothing_that_was_promised(tmp_path: Path) -> None:
    context, url = server(), f"file://{tmp_path}?capacity=4GiB"
    open_store(url, namespace=NAMESPACE).close()
    promised: list[bytes] = []
    killed_open = 0
    for life in range(LIVES):
        story = live_and_die(context, url, life)
        assert not story.refused, "a save was refused below capacity"
        assert not story.finished, "this life ended before it was killed"
        killed_open += story.was_open
        promised += story.saved
        with open_store(url, namespace=NAMESPACE) as store:
            assert store.lookup(promised).leading == len(promised), f"life {life} lost promised blocks"
            assert load(store, story.saved) == []
            load(store, story.pending)
            if life % CHECK_EVERY == 0:
                _must_be_clean(store)
    assert killed_open > LIVES // 2
    with open_store(url, namespace=NAMESPACE) as store:
        assert load(store, promised) == []
        _must_be_clean(store)
        assert store.save(batch_keys(LIVES, 0), [block(key) for key in batch_keys(LIVES, 0)]).wait(60)


def test_kills_beside_eviction_leave_the_pool_within_its_capacity(tmp_path: Path) -> None:
    capacity_bytes = 16 << 20
    context, url = server(), f"file://{tmp_path}?capacity={capacity_bytes}"
    open_store(url, namespace=NAMESPACE).close()
    known: list[bytes] = []
    for life in range(LIVES_WITH_EVICTION):
        story = live_and_die(context, url, life, may_drop=True)
        known += [*story.saved, *story.pending]
        with open_store(url, namespace=NAMESPACE) as store:
            recent = known[-KNOWN_MAX:]
            assert len(load(store, recent)) < len(recent) or not recent, "everything was lost"
            assert store.stats().used_bytes <= capacity_bytes
            _must_be_clean(store)
            keys = batch_keys(LIVES_WITH_EVICTION + life, 0)
            good = store.save(keys, [block(key) for key in keys]).wait(60)
            assert all(good), "segments of dead writers must make room"
            assert load(store, keys) == []
            known += keys
