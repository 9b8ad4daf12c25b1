"""What a stack does beyond a pool: promotion, write-behind within a budget, admission, tiers that are lost."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.held import HeldStore
from tests.tiers.test_pool_drives import Drives, until

import rewarm
from rewarm.errors import ConfigError
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import READ
from rewarm.store.memory import MemoryStore
from rewarm.store.metrics import store_families
from rewarm.testing import make_keys
from rewarm.testing.faulty import failure
from rewarm.testing.kit.base import blocks_of, load, save
from rewarm.tiers.admission import Admission, Policy, parse_admission
from rewarm.tiers.hot import HotStore
from rewarm.tiers.stack import StackSettings, StackStore

BLOCK = 16 << 10
DRAM = 1 << 20
KEYS = make_keys(8, "stack")
ALL = Policy("all")


class Media:
    """Two drives and a shared store in memory, and stacks over them."""

    def __init__(self) -> None:
        self.a, self.b, self.shared = MemoryStore(), MemoryStore(), MemoryStore()

    def stack(self, dram: int = DRAM, policy: Policy = ALL, behind: int | None = None) -> StackStore:
        settings = StackSettings(dram_bytes=dram, admission=policy, write_behind_bytes=behind)
        return StackStore([("a", self.a), ("b", self.b)], settings, shared=("shared", self.shared))

    def on_drives(self, keys: list[bytes]) -> int:
        return sum(key in self.a or key in self.b for key in keys)


@pytest.fixture
def media() -> Media:
    return Media()


@pytest.fixture
def stack(media: Media) -> Iterator[StackStore]:
    with media.stack() as stack:
        yield stack


def hits(stack: StackStore) -> dict[str, int]:
    """Blocks restored, by tier."""
    found: dict[str, int] = {}
    for tier in stack.stats().tiers:
        found[tier.tier] = found.get(tier.tier, 0) + tier.hits
    return found


def test_a_save_is_on_the_drives_in_dram_and_after_a_flush_in_the_shared_store(media: Media, stack: StackStore) -> None:
    assert save(stack, KEYS, BLOCK) == [Outcome.STORED] * 8
    assert media.on_drives(KEYS) == 8
    stack.flush()
    assert media.shared.lookup(KEYS).leading == 8
    assert load(stack, KEYS, BLOCK) == [Outcome.HIT] * 8
    assert hits(stack) == {"dram": 8, "local": 0, "shared": 0}
    assert save(stack, KEYS, BLOCK) == [Outcome.ALREADY] * 8


def test_what_only_the_shared_store_has_is_promoted_to_all_tiers(media: Media, stack: StackStore) -> None:
    save(media.shared, KEYS, BLOCK)
    assert stack.lookup(KEYS).leading == 8
    assert load(stack, KEYS, BLOCK) == [Outcome.HIT] * 8
    stack.flush()
    assert media.on_drives(KEYS) == 8
    assert load(stack, KEYS, BLOCK) == [Outcome.HIT] * 8
    assert hits(stack) == {"dram": 8, "local": 0, "shared": 8}


def test_what_drives_have_is_kept_in_dram_and_the_least_used_goes(media: Media) -> None:
    save(media.a, KEYS, BLOCK)
    with media.stack(dram=4 * BLOCK) as stack:
        for key in (*KEYS[:4], KEYS[0], KEYS[4]):
            assert load(stack, [key], BLOCK) == [Outcome.HIT]
        assert [key in stack._hot for key in KEYS[:5]] == [True, False, True, True, True]
        assert stack.stats().tiers[0].used_bytes == 4 * BLOCK


def test_one_request_reads_all_tiers(media: Media, stack: StackStore) -> None:
    save(media.a, KEYS[:3], BLOCK)
    save(media.shared, KEYS[3:6], BLOCK)
    load(stack, KEYS[:1], BLOCK)
    assert load(stack, KEYS, BLOCK) == [Outcome.HIT] * 6 + [Outcome.MISSING] * 2
    assert hits(stack) == {"dram": 1, "local": 3, "shared": 3}
    assert stack.media()[0].bytes_per_s == np.inf, "three media for compute-or-load"
    assert stack.places(KEYS[:7]).tolist()[-1] == -1


def test_write_behind_over_its_budget_is_refused_and_counted(media: Media) -> None:
    with media.stack(behind=3 * BLOCK) as stack:
        save(stack, KEYS, BLOCK)
        stack.flush()
        assert media.shared.lookup(KEYS).mask.sum() == 3
        stats = stack.stats()
        assert stats.behind_refused_bytes == 5 * BLOCK
        assert any(note.startswith("write-behind: 80.0 KiB were not copied") for note in stats.notes)
        assert stack._behind.queued_bytes == 0
        assert load(stack, KEYS, BLOCK) == [Outcome.HIT] * 8


def test_a_shared_store_that_hangs_holds_up_nobody() -> None:
    class Hanging(HeldStore):
        save = HeldStore.load  # type: ignore[assignment]  # holds writes as it holds reads

    shared, settings = Hanging(), StackSettings(dram_bytes=DRAM)
    stack = StackStore([("a", MemoryStore())], settings, shared=("shared", shared))
    memory = np.full((8, BLOCK), 7, np.uint8)
    transfer = stack.save(KEYS, memory)
    assert all(transfer.wait(10)), "no verdict waits for the copy"
    assert transfer.wait_released(10), "no memory does"
    shared.wait_for(1)
    assert load_equal(stack, memory)
    stack.evict(0)
    assert stack._hot.used_bytes == 8 * BLOCK, "what is being written stays where it is"
    shared.let_go()
    until(lambda: stack._hot.evict(0) == 8 * BLOCK)
    stack.close()


def load_equal(stack: StackStore, memory: np.ndarray) -> bool:
    target = np.zeros_like(memory)
    return all(stack.load(KEYS, target).wait(10)) and bool((target == memory).all())


def test_a_lost_drive_costs_only_what_no_other_tier_has(tmp_path: Path) -> None:
    drives, shared, settings = Drives(tmp_path), MemoryStore(), StackSettings(dram_bytes=DRAM)
    with StackStore([drives.open("a")], settings, shared=("shared", shared)) as stack:
        save(stack, KEYS, BLOCK)
        stack.flush()
        shared.evict(4 * BLOCK)
        stack._hot.erase()
        drives.reads["a"].chance(failure(errno.ENODEV), 1.0, opcode=READ)
        outcomes = load(stack, KEYS, BLOCK)
        assert outcomes == [Outcome.LOST_MEDIUM] * 4 + [Outcome.HIT] * 4
        assert stack.lookup(KEYS).mask.tolist() == [False] * 4 + [True] * 4
        assert any(note.startswith("a: avoided") for note in stack.stats().notes)
        assert save(stack, make_keys(2, "more"), BLOCK) == [Outcome.STORED] * 2, "the shared store takes it"
        assert all(key in shared for key in make_keys(2, "more"))


def test_what_others_erase_is_gone_from_dram_at_once(media: Media, stack: StackStore) -> None:
    save(stack, KEYS, BLOCK)
    stack.flush()
    for store in (media.a, media.b, media.shared):
        store.erase()
    assert not stack.lookup(KEYS).mask.any()
    assert KEYS[0] not in stack
    assert load(stack, KEYS, BLOCK) == [Outcome.MISSING] * 8


def test_a_load_that_ends_after_an_erasure_brings_nothing_back() -> None:
    drive = HeldStore()
    with StackStore([("a", drive)], StackSettings(dram_bytes=DRAM)) as stack:
        save(stack, KEYS, BLOCK)
        stack._hot.erase()
        transfer = stack.load(KEYS, np.zeros((8, BLOCK), np.uint8))
        drive.wait_for(1)
        stack.erase()
        MemoryStore.save(drive, KEYS, blocks_of(KEYS, BLOCK))
        drive.serve_until(transfer)
        assert transfer.wait_released(10)
        assert not stack._hot.lookup(KEYS).mask.any()


def test_second_sight_writes_what_comes_back(media: Media) -> None:
    with media.stack(policy=Policy("second-sight")) as stack:
        assert save(stack, KEYS, BLOCK) == [Outcome.REFUSED_ADMISSION] * 8
        assert media.on_drives(KEYS) == 0
        assert stack.stats().writes_saved_bytes == 8 * BLOCK
        assert stack.stats().refused[Outcome.REFUSED_ADMISSION] == 8
        assert stack.lookup(KEYS).leading == 8, "DRAM has it"
        assert load(stack, KEYS[:3], BLOCK) == [Outcome.HIT] * 3
        stack.flush()
        assert media.on_drives(KEYS) == 3
        assert media.shared.lookup(KEYS).leading == 3
        assert stack.stats().hits_lost == 0
        stack._hot.erase()
        assert save(stack, KEYS[3:5], BLOCK) == [Outcome.STORED] * 2, "computed and saved once more"
        stats = stack.stats()
        assert (stats.writes_saved_bytes, stats.hits_lost) == (3 * BLOCK, 2)


def test_short_saves_stay_in_dram(media: Media) -> None:
    with media.stack(policy=parse_admission("min-tokens=1000", block_tokens=256)) as stack:
        assert save(stack, KEYS[:3], BLOCK) == [Outcome.REFUSED_ADMISSION] * 3
        assert save(stack, KEYS[3:7], BLOCK) == [Outcome.STORED] * 4
        stack.flush()
        assert media.on_drives(KEYS) == 4
        assert load(stack, KEYS[:3], BLOCK) == [Outcome.HIT] * 3
        with stack.pin(KEYS[:3]) as pin:
            assert pin.mask.all()
            stack.evict(0)
            assert stack.lookup(KEYS).mask.tolist() == [True] * 3 + [False] * 5


def test_the_price_of_admission_is_counted_once_a_block() -> None:
    admission = Admission(Policy("long", 2))
    assert admission.admit(KEYS[:1], [5], [0]) == []
    assert admission.admit(KEYS[:1], [5], [0]) == []
    assert (admission.saved_bytes, admission.lost_blocks) == (5, 1)
    assert admission.admit(KEYS[:2], [5, 5], [0, 1]) == [0, 1]
    assert (admission.saved_bytes, admission.lost_blocks) == (0, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [("second-site", "did you mean 'second-sight'"), ("min-tokens=0", "not known"), ("min-tokens=9", "block_tokens")],
)
def test_a_bad_policy_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_admission(text)


def test_at_the_start_what_does_not_fit_is_said_with_the_number_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set dram to 2097152 or more, or write_behind to 524288"):
        rewarm.open(f"pool:?drive={tmp_path}&capacity=64MiB&dram=1MiB&write_behind=1MiB")
    with pytest.raises(ConfigError, match=r"'shared' in .* needs dram"):
        rewarm.open(f"pool:?drive={tmp_path}&capacity=64MiB&shared=/x")
    assert not any(tmp_path.iterdir()), "said before anything was made"


def test_the_hot_tier_is_bounded_and_gives_back_what_it_takes() -> None:
    hot, dice = HotStore(40 * 4096), np.random.default_rng(5)
    for number in range(300):
        size = int(dice.integers(1, 30_000))
        hot.keep([b"block %d" % number], [bytes([number % 251]) * size])
        assert hot.used_bytes <= 40 * 4096
        for back in range(max(number - 3, 0), number + 1):
            key = b"block %d" % back
            keys, views, let_go = hot.borrow([key])
            assert not keys or set(views[0].tolist()) == {back % 251}
            let_go()
    hot.erase()
    assert hot.used_bytes == 0
    assert hot._space.take(40 * 4096) == 0, "free parts have grown together again"


def test_figures_of_every_tier_are_metrics(media: Media, stack: StackStore) -> None:
    save(stack, KEYS, BLOCK)
    load(stack, KEYS, BLOCK)
    families = {family.name: family for family in store_families({"kv": stack.stats()})}
    read = {s.labels["medium"]: s.value for s in families["rewarm_tier_read_bytes_total"].samples}
    assert read == {"dram": 8 * BLOCK, "a": 0, "b": 0, "shared": 0}
    assert {s.labels["tier"] for s in families["rewarm_tier_used_bytes"].samples} == {"dram", "local", "shared"}
