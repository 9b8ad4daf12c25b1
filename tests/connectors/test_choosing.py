"""Compute or load in an engine: what is offered of a request, by measured media, what waits for them, and prefill."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.connectors import fake_vllm
from tests.connectors.conftest import Install, vllm_config, write_weights
from tests.connectors.test_tier import KEYS, ROW, end, job, make_tier

from rewarm.connectors.vllm.choosing import Chooser, Prompt, Shape
from rewarm.connectors.vllm.pace import Pace
from rewarm.store.memory import MemoryStore
from rewarm.testing import make_keys
from rewarm.tiers.pool import PoolStore
from rewarm.tiers.prefill import PrefillCurve

BLOCK, TOKENS, BLOCKS = 4096, 16, 32
CONTEXT = make_keys(BLOCKS, "context")
CURVE = PrefillCurve.of_rate(1600)
"""A block of 16 tokens is computed in 10 ms."""


@pytest.fixture
def pool() -> Iterator[PoolStore]:
    with PoolStore([("a", MemoryStore()), ("b", MemoryStore())]) as pool:
        pool._lanes[0].store.save(CONTEXT[:20], [bytes(BLOCK)] * 20)
        pool._lanes[1].store.save(CONTEXT[20:], [bytes(BLOCK)] * 12)
        yield pool


def set_speeds(pool: PoolStore, *blocks_per_s: float) -> None:
    for lane, speed in zip(pool._lanes, blocks_per_s, strict=True):
        lane.meter.bytes_per_s = speed * BLOCK


def chooser_of(pool: PoolStore, curve: PrefillCurve | None = CURVE, fixed_s: float = 0.0) -> Chooser:
    return Chooser(pool, Shape(block_bytes=BLOCK, block_tokens=TOKENS, fixed_s=fixed_s), lambda: curve)


def prompt(request: str = "r", computed: int = 0, tokens: int = BLOCKS * TOKENS + 1) -> Prompt:
    return Prompt(request=request, keys=CONTEXT[computed // TOKENS :], tokens=tokens, computed=computed)


def nowhere(key: bytes) -> bool:
    return False


def offered(chooser: Chooser, asked: Prompt) -> int:
    """Blocks of a request that may be loaded."""
    return len(asked.keys) - len(chooser.refused.get(asked.request, ()))


def test_everything_is_offered_while_nothing_is_known(pool: PoolStore) -> None:
    chooser = chooser_of(pool, curve=None)
    assert chooser.choose(prompt(), (), nowhere) is None
    assert not chooser.has_chosen("r"), "asked again when prefill is known"
    unmeasured = chooser_of(pool)
    unmeasured.choose(prompt(), (), nowhere)
    assert offered(unmeasured, prompt()) == BLOCKS
    assert unmeasured.cut_requests == 0


def test_loading_is_cut_where_it_stops_paying(pool: PoolStore, caplog: pytest.LogCaptureFixture) -> None:
    set_speeds(pool, 1000, 20)
    chooser = chooser_of(pool)
    with caplog.at_level(logging.INFO, "vllm.rewarm"):
        decision = chooser.choose(prompt(), (), nowhere)
    assert decision is not None
    assert decision.blocks == 20
    assert chooser.refused["r"] == frozenset(CONTEXT[20:])
    assert (chooser.cut_requests, chooser.asked_requests, chooser.refused_blocks) == (1, 1, 12)
    assert len([r for r in caplog.records if "loading pays for 320 of 513 tokens" in r.getMessage()]) == 1
    set_speeds(pool, 1, 1)
    assert chooser.choose(prompt(), (), nowhere) is None, "decided once"
    chooser.forget("r")
    assert not chooser.refused
    chooser.choose(prompt(), (), nowhere)
    assert offered(chooser, prompt()) == 0


def test_what_the_engine_has_itself_is_neither_loaded_nor_computed(pool: PoolStore) -> None:
    set_speeds(pool, 40, 1000)
    chooser = chooser_of(pool)
    chooser.choose(prompt("all"), (), nowhere)
    assert offered(chooser, prompt("all")) == 0, "the first medium is too slow"
    chooser.choose(prompt("near"), (), set(CONTEXT[:20]).__contains__)
    assert offered(chooser, prompt("near")) == BLOCKS
    later = prompt("computed", computed=20 * TOKENS)
    chooser.choose(later, (), nowhere)
    assert offered(chooser, later) == 12


def test_a_failed_block_ends_what_is_loaded(pool: PoolStore) -> None:
    set_speeds(pool, 1000, 1000)
    chooser = chooser_of(pool)
    decision = chooser.choose(prompt(), {CONTEXT[5]}, nowhere)
    assert decision is not None
    assert decision.blocks == 5
    assert CONTEXT[5] not in chooser.refused["r"], "it is a miss anyway, and not counted as ours"


def test_requests_of_one_step_wait_for_each_other(pool: PoolStore) -> None:
    """The store has been asked for none of them when the scheduler asks for the next."""
    set_speeds(pool, 200, 120)
    chooser, answers = chooser_of(pool), []
    for number in range(6):
        asked = prompt(f"r{number}")
        chooser.choose(asked, (), nowhere)
        answers.append(offered(chooser, asked))
    assert answers[0] == BLOCKS
    assert answers[-1] == 0, "the last would wait longer than it takes to compute"
    chooser.submitted("r0", BLOCKS // 2)
    assert chooser._offers["r0"].coming_bytes == BLOCKS // 2 * BLOCK
    for number in range(6):
        chooser.submitted(f"r{number}", BLOCKS)
        chooser.forget(f"r{number}")
    chooser.choose(prompt("later"), (), nowhere)
    assert offered(chooser, prompt("later")) == BLOCKS


def test_a_small_request_does_not_make_an_offer_late(pool: PoolStore) -> None:
    set_speeds(pool, 70, 70)
    chooser, small = chooser_of(pool), Prompt(request="s", keys=CONTEXT[:4], tokens=4 * TOKENS + 1, computed=0)
    chooser.choose(prompt(), (), nowhere)
    assert offered(chooser, prompt()) == BLOCKS, "there after 286 ms, computed after 321 ms"
    set_speeds(pool, 100, 100)
    chooser.choose(small, (), nowhere)
    assert offered(chooser, small) == 0, "40 ms more would be too late"
    chooser.forget("s")
    set_speeds(pool, 400, 400)
    chooser.choose(small, (), nowhere)
    assert offered(chooser, small) == 4


def test_no_offer_ends_after_prefill_over_lengths_rates_and_waves(pool: PoolStore) -> None:
    """Everything comes at once, and the media serve the shortest first; the last token is computed in any case."""
    offers = 0
    for rate, fixed_s in [(r, f) for r in (30, 90, 150, 400, 3000) for f in (0.0, 0.05)]:
        set_speeds(pool, rate, rate)
        chooser = chooser_of(pool, fixed_s=fixed_s)
        wave = []
        for number, blocks in enumerate([32, 4, 16, 32, 8, 32, 24, 32, 2]):
            asked = Prompt(request=f"r{number}", keys=CONTEXT[:blocks], tokens=blocks * TOKENS + 1, computed=0)
            chooser.choose(asked, (), nowhere)
            wave.append((offered(chooser, asked), number, asked))
        free_s = [0.0, 0.0]
        for taken, _, asked in sorted(wave, key=lambda row: row[:2]):
            for medium, count in enumerate([min(taken, 20), max(taken - 20, 0)]):
                free_s[medium] += count / rate
            if taken:
                loaded_s = max(free_s) if taken > 20 else free_s[0]
                rest_s = CURVE.seconds(asked.tokens - taken * TOKENS)
                assert loaded_s + fixed_s + rest_s <= CURVE.seconds(asked.tokens), (rate, fixed_s, taken)
                offers += 1
    assert offers > 30


def step(tokens: dict[str, int], new: dict[str, int], old: dict[str, int]) -> Any:
    """As much of a `SchedulerOutput` as is read: tokens by request, and what was computed before by new and old."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=n) for r, n in new.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(old), num_computed_tokens=list(old.values())),
    )


def test_the_pace_is_learned_from_steps_of_one_prompt() -> None:
    pace = Pace()
    pace.began(step({"a": 1000, "b": 900}, {"a": 0, "b": 0}, {}), 0.0)
    pace.ended(5.0)
    pace.began(step({"a": 64}, {}, {"a": 0}), 5.0)
    pace.ended(9.0)
    pace.ended(9.5)  # a step without tokens
    assert pace.curve() is None, "two prompts, a short one: no reading"
    pace.began(step({"a": 2000, "b": 1}, {"a": 0}, {"b": 70}), 10.0)
    pace.began(step({"a": 1000}, {}, {"a": 2000}), 10.1)  # scheduled before the first has ended
    pace.ended(12.0)
    pace.ended(13.0)
    curve = pace.curve()
    assert curve is not None
    assert curve.seconds(500) == pytest.approx(0.5)
    assert Pace(given=2000.0).curve() == PrefillCurve.of_rate(2000)


def test_a_tier_computes_what_it_was_told_to(install: Install, tmp_path: Path) -> None:
    tier = make_tier(install(), tmp_path, prefill_rate=16_000, fixed_cost="1ms")
    tier.submit_store(job(1, KEYS[:4], [0, 1, 2, 3]))
    end(tier)
    hashes = [key[:-4] for key in KEYS]
    suffix = (0).to_bytes(4, "big")
    keys = [value + suffix for value in hashes]
    tier.submit_store(job(2, keys[:4], [0, 1, 2, 3]))
    end(tier)
    request = SimpleNamespace(request_id="r", block_hashes=hashes, num_tokens=16 * 8 + 1)
    tier._store._lanes[0].meter.bytes_per_s = 1.0
    tier.choose(request, 0, nowhere)
    context = SimpleNamespace(req_id="r")
    assert [tier.lookup(key, context) for key in keys[:4]] == [fake_vllm.LookupResult.MISS] * 4
    assert tier.lookup(keys[0], SimpleNamespace(req_id="another")) is fake_vllm.LookupResult.HIT
    tier.forget("r")
    assert tier.lookup(keys[0], context) is fake_vllm.LookupResult.HIT
    tier.shutdown()


def test_a_tier_opens_pools_stacks_and_files(install: Install, tmp_path: Path) -> None:
    package = install()
    for name in ("a", "b", "shared"):
        (tmp_path / name).mkdir()
    config = tmp_path / "kv.toml"
    config.write_text(
        f'drives = ["{tmp_path}/a", "{tmp_path}/b"]\ncapacity = "64MiB"\ndram = "1MiB"\n'
        f'shared = "{tmp_path}/shared?capacity=64MiB"\nadmission = "min-tokens=32"\n'
    )
    tier = make_tier(package, tmp_path, url=str(config))
    tier.memory[:] = 5
    tier.submit_store(job(1, KEYS[:1], [0]))
    assert not end(tier).success, "16 tokens are too few for flash"
    tier.submit_store(job(2, KEYS[1:3], [1, 2]))
    assert end(tier).success
    tier.memory[:] = 0
    tier.submit_load(job(3, KEYS[:3], [3, 4, 5]))
    assert end(tier).success, "DRAM has what flash has not"
    assert (tier.memory[3:6] == 5).all()
    assert {each.tier for each in tier._store.stats().tiers} == {"dram", "local", "shared"}
    assert tier._traffic.failures.counts == {"save refused_admission": 1}
    tier.shutdown()


def test_models_of_several_kinds_of_layers_are_offered_everything(install: Install, tmp_path: Path) -> None:
    from tests.connectors.conftest import offloading_config

    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer.0",))
    config = offloading_config(groups=(group, SimpleNamespace(group_id=1, tokens_per_block=16, layer_names=("l",))))
    tier = make_tier(install(), tmp_path, config=config, prefill_rate=1)
    tier.choose(SimpleNamespace(request_id="r"), 0, nowhere)
    assert not tier._chooser.refused
    tier.shutdown()


def test_the_connector_asks_its_tiers_and_tells_them_of_steps(install: Install, tmp_path: Path) -> None:
    connector = install().RewarmConnector(
        vllm_config(write_weights(tmp_path)), fake_vllm.Role.SCHEDULER, SimpleNamespace(kv_tp_replicas=1)
    )
    calls: list[Any] = []

    class RewarmTier:
        pace = SimpleNamespace(began=lambda *a: calls.append("began"), ended=lambda *a: calls.append("ended"))

        def choose(self, request: Any, computed: int, near: Any) -> None:
            calls.append((request.request_id, computed, near(b"key")))

        def forget(self, request: str) -> None:
            calls.append(f"forget {request}")

    connector._tiers = [RewarmTier()]
    connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 16)
    connector.build_connector_meta(None)
    connector.update_connector_output(None)
    connector.request_finished(SimpleNamespace(request_id="r"), [])
    assert calls == [("r", 16, False), "began", "ended", "forget r"]


def test_the_start_says_what_must_be_in_flight_and_what_fits(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(install(), tmp_path)
    with caplog.at_level(logging.INFO, "vllm.rewarm"):
        tier.say_what_fits(64)
        tier.say_what_fits(1000)
    fits, short = [record for record in caplog.records if "in flight, the primary" in record.getMessage()]
    assert "32.0 KiB in flight" in fits.getMessage()
    assert "2.0 such requests at once" in fits.getMessage()
    assert (short.levelname, f"set {63 * ROW} or more" in short.getMessage()) == ("WARNING", True)
    tier.shutdown()
