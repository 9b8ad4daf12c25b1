"""What must not share blocks does not: weights, RoPE, tensor parallelism, tenants; and other kinds of attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.answers import same
from tests.engine.engines import Engine, prompt, rewarm_kv, whole_blocks

pytestmark = pytest.mark.engine

CONTEXT = prompt(40)


@pytest.fixture
def filled(new_engine: Callable[[], Engine], model: Path, pool: Path) -> Path:
    """A pool that holds the context."""
    engine = new_engine().start(model, rewarm_kv(pool))
    engine.generate(CONTEXT)
    engine.ask("settle")
    engine.ask("stop")
    engine.close()
    return pool


def restored_again(engine: Engine) -> dict[str, object]:
    """What the engine answers from blocks of its own."""
    engine.ask("settle")
    engine.ask("forget")
    return engine.generate(CONTEXT)


def test_other_weights_rope_and_ranks_each_miss(
    new_engine: Callable[[], Engine],
    make_model: Callable[..., Path],
    filled: Path,
    model: Path,
    recompute: Engine,
    tmp_path: Path,
) -> None:
    right = recompute.generate(CONTEXT)
    variants = {
        "another RoPE factor": {
            "hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
        },
        "two ranks": {"tensor_parallel_size": 2, "executor": "mp"},
    }
    for name, options in variants.items():
        engine = new_engine().start(model, rewarm_kv(filled), **options)
        answer = engine.generate(CONTEXT)
        assert answer["cached"] == [0], name
        assert same(answer, right) == (name == "two ranks"), name
        restored = restored_again(engine)
        assert restored["cached"] == [whole_blocks(1000)], name
        assert same(restored, answer), name
        engine.ask("stop")  # in order: ranks leave files in /dev/shm otherwise
        engine.close()


def test_other_weights_under_the_same_path_miss(
    new_engine: Callable[[], Engine], make_model: Callable[..., Path], tmp_path: Path, pool: Path
) -> None:
    path = tmp_path / "model"
    answers = []
    for seed in (10, 11):
        make_model(path, seed=seed)
        engine = new_engine().start(path, rewarm_kv(pool))
        answers.append(engine.generate(CONTEXT))
        engine.ask("settle")
        engine.ask("stop")
        engine.close()
    assert [answer["cached"] for answer in answers] == [[0], [0]]
    assert answers[0]["logprobs"] != answers[1]["logprobs"]


def test_tenants_with_another_salt_miss(new_engine: Callable[[], Engine], model: Path, filled: Path) -> None:
    engine = new_engine().start(model, rewarm_kv(filled))
    assert engine.generate(CONTEXT, salt="tenant")["cached"] == [0]
    assert engine.generate(CONTEXT)["cached"] == [whole_blocks(1000)]


@pytest.mark.parametrize("kind", ["gemma2", "deepseek_v2"])
def test_sliding_windows_and_latent_attention_restore(
    new_engine: Callable[[], Engine], make_model: Callable[..., Path], pool: Path, kind: str
) -> None:
    engine = new_engine().start(make_model(kind=kind), rewarm_kv(pool))
    computed = engine.generate(CONTEXT)
    own_cache = engine.generate(CONTEXT)
    restored = restored_again(engine)
    assert computed["cached"] == [0]
    assert restored["cached"] == own_cache["cached"] == [whole_blocks(1000)]
    assert restored["tokens"] == computed["tokens"]
    # Latent attention computes a whole prompt by another formula than its last block: compare like with like.
    assert restored["logprobs"] == own_cache["logprobs"]
