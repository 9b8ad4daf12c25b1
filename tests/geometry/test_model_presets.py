"""Every bundled preset against the arithmetic of its published configuration, and how presets are found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rewarm.errors import ConfigError
from rewarm.geometry import (
    DType,
    LayerKind,
    bytes_per_rank_token,
    bytes_per_token,
    bytes_total,
    load_model,
    preset_names,
    state_bytes,
    supported_architectures,
)

BF16 = 2

BYTES_PER_TOKEN = {
    # name: (the arithmetic: 2 for keys and values x layers x key/value heads x head width x bytes, the known value)
    "Llama-3.1-8B": (2 * 32 * 8 * 128 * BF16, 131_072),
    "Llama-3.3-70B": (2 * 80 * 8 * 128 * BF16, 327_680),
    "Qwen2.5-32B": (2 * 64 * 8 * 128 * BF16, 262_144),
    "Qwen3-0.6B": (2 * 28 * 8 * 128 * BF16, 114_688),
    "Qwen3-8B": (2 * 36 * 8 * 128 * BF16, 147_456),
    "Qwen3-32B": (2 * 64 * 8 * 128 * BF16, 262_144),
    "Qwen3-30B-A3B": (2 * 48 * 4 * 128 * BF16, 98_304),
    "Qwen3-235B-A22B": (2 * 94 * 4 * 128 * BF16, 192_512),
    "Qwen3-Coder-480B-A35B": (2 * 62 * 8 * 128 * BF16, 253_952),
    "Qwen3-Next-80B-A3B": (2 * (48 // 4) * 2 * 256 * BF16, 24_576),  # every fourth layer remembers every token
    "DeepSeek-V3": (61 * (512 + 64) * BF16, 70_272),  # MLA: one latent and one rotary key for all heads
    "DeepSeek-V3.2": (61 * (512 + 64) * BF16 + 61 * 128 * BF16, 85_888),  # and a bf16 indexer key
    "Kimi-K2": (61 * (512 + 64) * BF16, 70_272),
    "gpt-oss-20b": (2 * (24 // 2) * 8 * 64 * BF16, 24_576),  # the full half of the layers
    "gpt-oss-120b": (2 * (36 // 2) * 8 * 64 * BF16, 36_864),
    "Gemma-3-27B": (2 * (62 // 6) * 16 * 128 * BF16, 81_920),  # every sixth layer is full: 10 of 62
    "tiny-demo": (2 * 8 * 4 * 64 * BF16, 8_192),
}

PUBLISHED_ACTIVE = {
    "Llama-3.1-8B": 8.03e9,
    "Llama-3.3-70B": 70.6e9,
    "Qwen2.5-32B": 32.5e9,
    "Qwen3-0.6B": 0.6e9,
    "Qwen3-8B": 8.2e9,
    "Qwen3-32B": 32.8e9,
    "Qwen3-30B-A3B": 3.3e9,
    "Qwen3-235B-A22B": 22e9,
    "Qwen3-Coder-480B-A35B": 35e9,
    "DeepSeek-V3": 37e9,
    "DeepSeek-V3.2": 37e9,
    "Kimi-K2": 32e9,
    "gpt-oss-20b": 3.61e9,
    "gpt-oss-120b": 5.13e9,
    "Gemma-3-27B": 27.0e9,
}


def test_every_preset_has_its_arithmetic_here() -> None:
    assert set(BYTES_PER_TOKEN) == set(preset_names())


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token_in_bf16(name: str) -> None:
    arithmetic, known = BYTES_PER_TOKEN[name]
    model = load_model(name)
    assert model.kv_dtype is DType.BF16
    assert bytes_per_token(model) == arithmetic == known


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_fp8_halves_and_fp32_doubles(name: str) -> None:
    model = msgspec.structs.replace(load_model(name), index_dtype=DType.FP8)
    halved = msgspec.structs.replace(model, index_dtype=DType.BF16)
    assert bytes_per_token(model, "fp8") * 2 == bytes_per_token(halved, "bf16")
    doubled = msgspec.structs.replace(model, index_dtype=DType.FP32)
    assert bytes_per_token(doubled, "fp32") == 2 * bytes_per_token(halved, "fp16")


def test_totals_of_models_with_windows() -> None:
    tokens = 30_208
    gemma = load_model("Gemma-3-27B")
    assert gemma.layer_counts() == {"full": 10, "sliding_window": 52}
    assert bytes_total(gemma, tokens) == 2 * 16 * 128 * 2 * (10 * tokens + 52 * 1024)
    assert bytes_total(gemma, 100) == 2 * 16 * 128 * 2 * 62 * 100  # below the window nothing is forgotten
    oss = load_model("gpt-oss-120b")
    assert bytes_total(oss, tokens) == 2 * 8 * 64 * 2 * (18 * tokens + 18 * 128)


def test_total_and_state_of_a_hybrid() -> None:
    model = load_model("Qwen3-Next-80B-A3B")
    recurrent = 32 * 128 * 128 * 4  # value heads x key width x value width, kept in fp32
    convolution = (4 - 1) * (2 * 16 * 128 + 32 * 128) * 2  # kernel - 1 positions of queries, keys and values
    assert state_bytes(model) == 36 * (recurrent + convolution)
    assert bytes_total(model, 1000) == 24_576 * 1000 + 36 * (recurrent + convolution)
    assert bytes_total(model, 0) == 0


def test_the_published_cold_recovery_request() -> None:
    # 30,208 tokens of Qwen3-Coder-480B in bf16 are the 7,671,382,016 bytes of the published wave
    assert bytes_total(load_model("Qwen3-Coder-480B-A35B"), 30_208) == 7_671_382_016


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    model = load_model(name)
    assert model.active_parameters_source == "published"
    assert model.active_parameters == pytest.approx(PUBLISHED_ACTIVE[name], rel=0.005)


def test_presets_without_a_published_count_say_so() -> None:
    unpublished = set(preset_names()) - set(PUBLISHED_ACTIVE)
    assert {load_model(name).active_parameters_source for name in unpublished} == {"estimated"}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama-3.1-8b", "Llama-3.1-8B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("LLAMA-3-70B", "Llama-3.3-70B"),
        ("Qwen3-Coder-480B", "Qwen3-Coder-480B-A35B"),
        ("google/gemma-3-27b-it", "Gemma-3-27B"),
        ("deepseek-r1", "DeepSeek-V3"),
    ],
)
def test_presets_are_found_by_any_case_owner_and_alias(written: str, name: str) -> None:
    assert load_model(written).name == name


def test_an_unknown_name_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'Qwen3-32B'.*Gemma-3-27B"):
        load_model("Qwen3-33B")
    with pytest.raises(ConfigError, match="presets: Llama") as error:
        load_model("zzzz")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("odd", ["", "a\0b", "x" * 5000, "a/b/c", "~", "no-such/file.json"])
def test_odd_names_are_refused_as_configuration(odd: str) -> None:
    with pytest.raises(ConfigError):
        load_model(odd)


def test_latent_attention_is_the_same_on_every_rank() -> None:
    model = load_model("DeepSeek-V3")
    assert bytes_per_rank_token(model, tp=8) == bytes_per_token(model) == 70_272
    assert all(layer.kind is LayerKind.MLA for layer in model.layers)


def test_the_reference_page_lists_every_preset_and_architecture() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "geometry.md").read_text()
    words = set(page.replace(",", " ").replace(".\n", " ").replace("`", " ").split())
    assert {*preset_names(), *supported_architectures()} <= words
