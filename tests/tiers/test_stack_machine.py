"""Three tiers under everything at once, saves, restores, promotion, copies, eviction: right bytes or a miss.

Batches are started and not waited for, so that the next rules meet them under way: tiers evict, other hosts evict and
erase what is being promoted, DRAM has room for a few blocks only.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.lengths import repeated

import rewarm
from rewarm.store.contract import Outcome, Store, Transfer
from rewarm.testing import make_keys, payload
from rewarm.tiers.stack import StackStore

KEYS = make_keys(40, "three tiers")
BLOCK = 16 << 10
DRAM = 12 * BLOCK
CAPACITY = 4 << 20
WAIT_S = 30.0
SAVED = (Outcome.STORED, Outcome.ALREADY, Outcome.REFUSED_ADMISSION, Outcome.REFUSED_FULL, Outcome.REFUSED_BUDGET)

some_keys = st.sampled_from([KEYS[first : first + 10] for first in range(0, 40, 5)])
"""Contexts that overlap, as those of conversations do."""


class ThreeTiers(RuleBasedStateMachine):
    """Two hosts: each a stack over drives of its own and DRAM of its own, one shared store."""

    admission = "all"

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self.root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rewarm-tiers-")))
        self.hosts = [self._open(host) for host in ("one", "two")]
        self.saved: set[bytes] = set()
        self.loads: list[tuple[list[bytes], np.ndarray, Transfer, set[bytes]]] = []
        self.saves: list[Transfer] = []

    def drive(self, name: str) -> str:
        """The URL of one medium."""
        return f"memory:{self.root}/{name}"

    def _open(self, host: str) -> StackStore:
        drives = "&".join(f"drive={self.drive(f'{host}-{n}')}%3Fcapacity={CAPACITY}" for n in ("a", "b"))
        shared = f"shared={self.drive('shared')}%3Fcapacity={CAPACITY}"
        url = f"pool:?{drives}&{shared}&dram={DRAM}&admission={self.admission}"
        store = self._stack.enter_context(rewarm.open(url, namespace="machine"))
        assert isinstance(store, StackStore)
        return store

    @initialize()
    def begin(self) -> None:
        """Start with something to promote."""
        self.save(0, KEYS[:20])
        self.save(1, KEYS[20:])

    @rule(host=st.integers(0, 1), keys=some_keys)
    def save(self, host: int, keys: list[bytes]) -> None:
        """Save blocks; the bytes belong to the key."""
        self.saved.update(keys)
        self.saves.append(self.hosts[host].save(keys, [payload(key, BLOCK) for key in keys]))

    @rule(host=st.integers(0, 1), keys=some_keys, patience=st.sampled_from([None, None, 0.0]))
    def load(self, host: int, keys: list[bytes], patience: float | None) -> None:
        """Load blocks; some loads are given up at once."""
        target = np.zeros((len(keys), BLOCK), np.uint8)
        transfer = self.hosts[host].load(keys, target)
        if patience is not None:
            transfer.wait(patience)
        self.loads.append((keys, target, transfer, set(self.saved)))

    @rule(host=st.integers(0, 1), tier=st.integers(0, 3), share=st.sampled_from([0, 5, 8]))
    def one_tier_evicts(self, host: int, tier: int, share: int) -> None:
        """A tier makes room for itself, as another process would make it."""
        store: Store = self.hosts[host]._lanes[tier].store
        store.evict(store.stats().used_bytes * share // 10)

    @rule(host=st.integers(0, 1), to_bytes=st.sampled_from([CAPACITY // 16, CAPACITY // 8]))
    def evict(self, host: int, to_bytes: int) -> None:
        """All tiers evict."""
        self.hosts[host].evict(to_bytes)

    @rule(host=st.integers(0, 1), rarely=st.integers(0, 3))
    def erase(self, host: int, rarely: int) -> None:
        """Everything goes; what is under way may come after."""
        if not rarely:
            self.hosts[host].erase()

    @rule()
    def settle(self) -> None:
        """Judge what was loaded."""
        for transfer in self.saves:
            transfer.wait(WAIT_S)
            assert transfer.wait_released(WAIT_S)
            assert set(transfer.outcomes) <= set(SAVED), transfer.outcomes
        for keys, target, transfer, saved in self.loads:
            transfer.wait(WAIT_S)
            assert transfer.wait_released(WAIT_S)
            for key, row, outcome in zip(keys, target, transfer.outcomes, strict=True):
                assert outcome in (Outcome.HIT, Outcome.MISSING, Outcome.TIMED_OUT), outcome
                if outcome is Outcome.HIT:
                    assert key in saved, "a hit that nobody had saved"
                    assert row.tobytes() == payload(key, BLOCK), "wrong bytes"
        self.loads.clear()
        self.saves.clear()

    @invariant()
    def dram_is_bounded(self) -> None:
        """Never more than its mapping."""
        assert all(host._hot.used_bytes <= DRAM for host in self.hosts)

    def teardown(self) -> None:
        """Judge the rest; nothing is left borrowed, and every free part of DRAM is found again."""
        self.settle()
        for host in self.hosts:
            host.flush()
            stats = host.stats()
            assert (stats.unreleased_bytes, stats.queued_bytes, host._behind.queued_bytes) == (0, 0, 0)
            host._hot.erase()
            assert host._hot._space.take(DRAM) == 0, "somebody still holds blocks"
        self._stack.close()


class SecondSight(ThreeTiers):
    admission = "second-sight"


class Directories(ThreeTiers):
    def drive(self, name: str) -> str:
        (self.root / name).mkdir(exist_ok=True)
        return str(self.root / name)


class TestThreeTiers(ThreeTiers.TestCase):
    settings = settings(max_examples=8, stateful_step_count=25)


@pytest.mark.crash
class TestThreeTiersAtLength(ThreeTiers.TestCase):
    settings = settings(max_examples=repeated(30, 100), stateful_step_count=50)


@pytest.mark.crash
class TestSecondSightAtLength(SecondSight.TestCase):
    settings = settings(max_examples=repeated(20, 60), stateful_step_count=50)


@pytest.mark.crash
class TestDirectoriesAtLength(Directories.TestCase):
    settings = settings(max_examples=repeated(6, 15), stateful_step_count=40)
