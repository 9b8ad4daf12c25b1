"""Namespaces: whatever changes the bytes of a block changes them; what is not known is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.connectors.conftest import HfConfig, offloading_config, vllm_config, write_weights

from rewarm.connectors.vllm.identity import engine_namespace, identify, named_namespace
from rewarm.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def digest(model: Path, offloading: Any = None, engine: str = "vllm 0.32 cuda", **changes: Any) -> bytes:
    """The namespace of an engine."""
    identity = identify(vllm_config(model, **changes), 1)
    return engine_namespace(identity, offloading or offloading_config(), 8192, engine).digest


def named(name: str, offloading: Any) -> bytes:
    """The namespace that a user named."""
    return named_namespace(name, offloading, 8192, "vllm 0.32 cuda").digest


def test_the_same_engine_has_the_same_namespace(tmp_path: Path) -> None:
    model = write_weights(tmp_path / "a")
    assert digest(model) == digest(model)


def test_a_copy_of_the_model_elsewhere_has_the_same_namespace(tmp_path: Path) -> None:
    assert digest(write_weights(tmp_path / "a")) == digest(write_weights(tmp_path / "b"))


def test_other_weights_under_the_same_path_have_another(tmp_path: Path) -> None:
    before = digest(write_weights(tmp_path / "a", 1))
    assert digest(write_weights(tmp_path / "a", 2)) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__hf_config": HfConfig(rope_parameters={"rope_theta": 10000.0, "factor": 2.0})},
        {"model_config__hf_config": HfConfig(hidden_size=16)},
        {"model_config__quantization": "fp8"},
        {"attention_config__backend": "FLASHINFER"},
        {"engine": "vllm 0.33 cuda"},
        {"model_config__dtype": "torch.float16"},
        {"model_config__disable_sliding_window": True},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__calculate_kv_scales": True},
        {"cache_config__prefix_caching_hash_algo": "sha256"},
        {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_part_of_the_engine_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_weights(tmp_path / "a")
    assert digest(model, **changes) != digest(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel__tp_size": 2, "parallel__world_size": 2},
        {"parallel__pp_size": 2, "parallel__world_size": 2},
        {"parallel__dcp_size": 2},
        {"cache__tokens_per_hash": 32},
        {"cache__blocks_per_chunk": 4},
        {"kv_cache_layout": "LBNHC"},
        {"replicated_layout": True},
        {"canonical_layout": True},
        {"worker_kv_bytes_per_block": 4096},
        {"model__dtype": "fp8_ds_mla"},
        {"groups": ()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_part_of_the_blocks_counts(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = write_weights(tmp_path / "a")
    changed = offloading_config(**changes)
    assert digest(model, changed) != digest(model)
    assert named("n", changed) != named("n", offloading_config())


def test_the_longest_context_counts_only_where_it_changes_rope(tmp_path: Path) -> None:
    model = write_weights(tmp_path / "a")
    assert digest(model, model_config__max_model_len=8192) == digest(model)
    long_rope = {"model_config__hf_config": HfConfig(rope_parameters={"rope_type": "longrope"})}
    assert digest(model, **long_rope) != digest(model, model_config__max_model_len=8192, **long_rope)


def test_a_draft_model_counts_with_its_weights(tmp_path: Path) -> None:
    model, draft = write_weights(tmp_path / "a"), tmp_path / "draft"
    seen = set()
    for value in (1, 2):
        write_weights(draft, value)
        of_draft = SimpleNamespace(model=str(draft), hf_config=HfConfig())
        speculative = SimpleNamespace(method="eagle", draft_model_config=of_draft)
        seen.add(digest(model, speculative_config=speculative))
    assert len(seen) == 2


def test_a_model_of_a_hub_is_known_by_its_commit() -> None:
    config = vllm_config(Path("owner/model"), model_config__hf_config=HfConfig(_commit_hash=COMMIT))
    assert identify(config, 1).commit == COMMIT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_config__model": "owner/model"}, "no directory here"),
        ({"lora_config": object()}, "LoRA"),
        ({"load_config__load_format": "dummy"}, "dummies"),
    ],
)
def test_what_is_not_known_is_refused_and_says_what_to_do(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = vllm_config(write_weights(tmp_path / "a"), **changes)
    with pytest.raises(ConfigError, match=words) as error:
        identify(config, 1)
    assert '"namespace": "<name>"' in str(error.value)


def test_a_name_keeps_apart_from_other_names_and_from_engines(tmp_path: Path) -> None:
    name = named_namespace("n", offloading_config(), 8192, "vllm 0.32 cuda")
    assert name.digest != named("m", offloading_config())
    assert name.digest != digest(write_weights(tmp_path / "a"))
    assert '"name": "n"' in name.describe()
    with pytest.raises(ConfigError, match="empty"):
        named(" ", offloading_config())
