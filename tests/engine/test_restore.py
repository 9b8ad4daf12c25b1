"""Blocks that one engine stored are restored by another, and the answers are those of recomputing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.answers import same
from tests.engine.engines import Engine, EngineError, Host, prompt, rewarm_kv, whole_blocks

pytestmark = pytest.mark.engine


def test_a_second_process_restores_what_the_first_stored(
    new_engine: Callable[[], Engine], model: Path, pool: Path, recompute: Engine
) -> None:
    contexts = [prompt(1), prompt(2, 500)]
    right = [recompute.generate(context) for context in contexts]
    assert right[0]["tokens"] != right[1]["tokens"], "a model that always says the same proves nothing"
    first = new_engine().start(model, rewarm_kv(pool))
    for context, reference in zip(contexts, right, strict=True):
        stored = first.generate(context)
        assert stored["cached"] == [0]
        assert same(stored, reference)
    assert first.ask("settle")["failures"] == {}
    first.ask("stop")
    second = new_engine().start(model, rewarm_kv(pool))
    for context, reference in zip(contexts, right, strict=True):
        restored = second.generate(context)
        assert restored["cached"] == [whole_blocks(len(context))]
        assert same(restored, reference)
        # The same computation from the engine's own cache, alone in its batch: the restored bytes are the computed
        # ones, bit for bit.
        again = recompute.generate(context)
        assert again["cached"] == restored["cached"]
        assert restored["logprobs"] == again["logprobs"]


def test_killed_in_a_wave_and_started_again(
    new_engine: Callable[[], Engine], model: Path, pool: Path, recompute: Engine
) -> None:
    known = prompt(3)
    right = recompute.generate(known)
    victim = new_engine().start(model, rewarm_kv(pool))
    victim.generate(known)
    victim.ask("settle")
    victim.tell("generate", prompts=[known, *(prompt(seed) for seed in range(100, 108))], tokens=64)
    victim.kill()
    checked = subprocess.run(
        [sys.executable, "-m", "rewarm", "check", str(pool), "--json"], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout.decode() + checked.stderr.decode()
    assert json.loads(checked.stdout)["clean"]
    engine = new_engine().start(model, rewarm_kv(pool))
    restored = engine.generate(known)
    assert restored["cached"] == [whole_blocks(1000)]
    assert same(restored, right)


def test_two_engines_read_each_other(
    new_engine: Callable[[], Engine], model: Path, pool: Path, recompute: Engine
) -> None:
    of_one, of_two = prompt(4), prompt(5)
    right = recompute.generate(of_one, of_two)
    one = new_engine().start(model, rewarm_kv(pool))
    two = new_engine().start(model, rewarm_kv(pool))
    one.generate(of_one)
    one.ask("settle")
    two.ask("refresh")
    two.generate(of_two)
    two.ask("settle")
    one.ask("refresh")
    from_other = two.generate(of_one), one.generate(of_two)
    assert [answer["cached"] for answer in from_other] == [[whole_blocks(1000)], [whole_blocks(1000)]]
    assert [answer["tokens"][0] for answer in from_other] == right["tokens"]


def test_vllm_0_31_restores_too(older_host: Host, model: Path, pool: Path, recompute: Engine) -> None:
    context = prompt(6)
    right = recompute.generate(context)
    engine = older_host.engine().start(model, rewarm_kv(pool))
    assert engine.version.startswith("0.31.")
    assert engine.generate(context)["cached"] == [0]
    engine.ask("settle")
    engine.ask("forget")
    restored = engine.generate(context)
    assert restored["cached"] == [whole_blocks(1000)]
    assert same(restored, right)


def test_a_random_hash_seed_is_refused(new_engine: Callable[[], Engine], model: Path, pool: Path) -> None:
    with pytest.raises(EngineError, match="PYTHONHASHSEED"):
        new_engine().start(model, rewarm_kv(pool), prefix_caching_hash_algo="xxhash")
