"""The prefill formula against published readings and against sums over tokens, and what follows from it."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.geometry import (
    GPUS,
    Layer,
    LayerKind,
    MeasuredPrefill,
    Model,
    ModelledPrefill,
    break_even_bandwidth,
    bytes_total,
    find_gpu,
    load_model,
    meeting_point,
    prefill_flops,
    prefill_s,
)

LLAMA70 = load_model("Llama-3.3-70B")
FOUR_H100 = ModelledPrefill(gpus=4, peak_flops_per_s=989e12, mfu=0.5)


def test_70b_with_128k_tokens_on_four_h100_takes_about_20_seconds() -> None:
    # 2 x 70.55e9 x 131,072 + 4 x 80 x 64 x 128 x 131,072^2 / 2 over 4 x 989e12 x 0.5
    by_hand = (2 * 70_553_706_496 * 131_072 + 4 * 80 * 64 * 128 * 131_072**2 / 2) / (4 * 989e12 * 0.5)
    assert prefill_s(LLAMA70, 131_072, 0, FOUR_H100) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(("gpu", "published"), [("A800", 5.9e9), ("H800", 18.6e9)])
def test_break_even_of_the_mooncake_paper(gpu: str, published: float) -> None:
    # Mooncake, equation 2: a LLaMA3-70B-like model, 8K tokens, 8 GPUs at their peak. The paper counts 22 d^2 per layer
    # and token for the weights and the whole square for attention; the weights' real number differs by a few per cent.
    prefill = ModelledPrefill(gpus=8, peak_flops_per_s=find_gpu(gpu).bf16_flops_per_s, mfu=1.0)
    assert break_even_bandwidth(LLAMA70, 8192, prefill) == pytest.approx(published, rel=0.10)


def test_flops_of_a_suffix_are_those_of_the_whole_less_the_prefix() -> None:
    whole, prefix = prefill_flops(LLAMA70, 10_000), prefill_flops(LLAMA70, 6_000)
    assert prefill_flops(LLAMA70, 4_000, cached=6_000) == pytest.approx(whole - prefix)


def model_of(layer: Layer, active: int | None = 10**9) -> Model:
    source = "unknown" if active is None else "published"
    return Model(name="m", architecture="a", layers=(layer,), active_parameters=active, active_parameters_source=source)


FULL = Layer(kind=LayerKind.FULL, query_heads=8, kv_heads=2, key_dim=64, value_dim=64)
WINDOW = msgspec.structs.replace(FULL, kind=LayerKind.SLIDING, window=100)


def attention_flops(layer: Layer, tokens: int, cached: int) -> float:
    return prefill_flops(model_of(layer), tokens, cached) - 2e9 * tokens


@given(st.integers(1, 400), st.integers(0, 400))
def test_attention_is_near_the_sum_over_tokens(tokens: int, cached: int) -> None:
    per_pair = 4 * 8 * 64
    seen = [cached + i + 0.5 for i in range(tokens)]  # a token sees all before it and half of itself
    assert attention_flops(FULL, tokens, cached) == pytest.approx(per_pair * sum(seen), abs=1e6)
    exact = per_pair * sum(min(count, 100) for count in seen)
    assert attention_flops(WINDOW, tokens, cached) >= exact * 0.99 - 1e6
    assert attention_flops(WINDOW, tokens, cached) <= attention_flops(FULL, tokens, cached) + 1e6


def test_a_full_window_costs_m_times_w() -> None:
    assert attention_flops(WINDOW, 10_000, 0) == pytest.approx(4 * 8 * 64 * 10_000 * 100)
    assert attention_flops(WINDOW, 50, 10_000) == pytest.approx(4 * 8 * 64 * 50 * 100)


def test_latent_attention_counts_its_own_head_widths() -> None:
    layer = Layer(kind=LayerKind.MLA, query_heads=128, key_dim=192, value_dim=128, latent_dim=512, rope_dim=64)
    assert attention_flops(layer, 1000, 500) == pytest.approx(128 * 2 * (192 + 128) * (500 * 1000 + 1000**2 / 2))


def test_a_sparse_indexer_caps_attention_and_scores_every_pair() -> None:
    layer = Layer(
        kind=LayerKind.MLA, query_heads=128, key_dim=192, value_dim=128, latent_dim=512, rope_dim=64,
        index_heads=64, index_dim=128, index_topk=2048,
    )  # fmt: skip
    pairs = 100_000**2 / 2
    scores = 2 * 64 * 128 * pairs
    chosen = 2 * 128 * (2 * 512 + 64) * 100_000 * 2048
    assert attention_flops(layer, 100_000, 0) == pytest.approx(scores + chosen)
    short = 2 * 128 * (192 + 128) * 1000**2 / 2  # below the top k, all pairs with the expanded heads cost less
    assert attention_flops(layer, 1000, 0) == pytest.approx(2 * 64 * 128 * 1000**2 / 2 + short)


def test_a_recurrent_layer_has_no_pairs() -> None:
    layer = Layer(kind=LayerKind.LINEAR, query_heads=16, kv_heads=32, state_elements=100)
    assert attention_flops(layer, 100_000, 0) == 0


def test_unknown_active_parameters_are_refused_where_the_formula_needs_them() -> None:
    model = model_of(FULL, active=None)
    with pytest.raises(ConfigError, match=r"active parameters of m are unknown.*measured"):
        FOUR_H100.seconds(model, 10)
    assert MeasuredPrefill(tokens_per_s=100.0).seconds(model, 10) == pytest.approx(0.1)


def test_a_measured_rate_replaces_the_formula_and_says_so() -> None:
    measured = MeasuredPrefill(tokens_per_s=5_000.0, fixed_s=0.2)
    assert (measured.source, FOUR_H100.source) == ("measured", "modelled")
    assert prefill_s(LLAMA70, 30_000, 0, measured) == pytest.approx(6.2)
    assert prefill_s(LLAMA70, 30_000, 90_000, measured) == pytest.approx(6.2)
    assert prefill_s(LLAMA70, 0, 0, measured) == prefill_s(LLAMA70, 0, 0, FOUR_H100) == 0.0


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(0, 200_000))
def test_prefill_grows_with_tokens_and_with_what_is_cached(tokens: int, more: int, cached: int) -> None:
    assert prefill_flops(LLAMA70, tokens + more, cached) > prefill_flops(LLAMA70, tokens, cached)
    assert prefill_flops(LLAMA70, tokens, cached + more) > prefill_flops(LLAMA70, tokens, cached)


@given(st.integers(1, 100_000), st.floats(0.0, 0.5))
def test_at_the_break_even_bandwidth_loading_takes_as_long_as_computing(tokens: int, floor: float) -> None:
    bandwidth = break_even_bandwidth(LLAMA70, tokens, FOUR_H100, floor_s=floor)
    compute = FOUR_H100.seconds(LLAMA70, tokens)
    if compute <= floor:
        assert bandwidth == math.inf
    else:
        assert floor + bytes_total(LLAMA70, tokens) / bandwidth == pytest.approx(compute)


@given(
    st.sampled_from(["Llama-3.3-70B", "Gemma-3-27B", "DeepSeek-V3.2", "Qwen3-Next-80B-A3B"]),
    st.integers(0, 60_000),
    st.floats(1e8, 1e12),
    st.floats(0, 2),
)
def test_the_meeting_point_is_the_best_split(name: str, tokens: int, bandwidth: float, floor: float) -> None:
    model = load_model(name)
    meeting = meeting_point(model, tokens, bandwidth, FOUR_H100, floor_s=floor)

    def ends(x: int) -> float:
        load = bytes_total(model, tokens - x) / bandwidth + floor if x < tokens else 0.0
        return max(FOUR_H100.seconds(model, x), load)

    assert meeting.computed_tokens + meeting.loaded_tokens == tokens
    assert meeting.seconds == ends(meeting.computed_tokens)
    near = range(max(0, meeting.computed_tokens - 3), min(tokens, meeting.computed_tokens + 3) + 1)
    others = {0, tokens, tokens // 2, *near}
    assert meeting.seconds <= min(ends(x) for x in others) * (1 + 1e-12)


def test_the_meeting_point_of_equal_speeds_is_near_the_middle() -> None:
    rate = MeasuredPrefill(tokens_per_s=1000.0)
    meeting = meeting_point(LLAMA70, 10_000, 1000 * 327_680, rate)
    assert (meeting.computed_tokens, meeting.seconds) == (5000, pytest.approx(5.0))
    thrice = meeting_point(LLAMA70, 10_000, 3 * 1000 * 327_680, rate)
    assert thrice.seconds == pytest.approx(1 / (1 / 10.0 + 1 / (10.0 / 3)), rel=1e-3)
    assert meeting_point(LLAMA70, 10_000, 1.0, rate).loaded_tokens == 0  # a dead slow medium


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"peak_flops_per_s": 0.0}, "peak_flops_per_s must be a positive number"),
        ({"peak_flops_per_s": math.nan}, "peak_flops_per_s must be a positive number"),
        ({"mfu": 0.0}, "mfu must be above 0"),
        ({"mfu": 1.5}, "mfu must be above 0"),
        ({"fixed_s": -1.0}, "fixed_s must be zero or"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, float], message: str) -> None:
    good: dict[str, float] = {"gpus": 1, "peak_flops_per_s": 1e12, "mfu": 0.5, "fixed_s": 0.0}
    with pytest.raises(ConfigError, match=message):
        ModelledPrefill(**(good | values))  # type: ignore[arg-type]


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="tokens_per_s"):
        MeasuredPrefill(tokens_per_s=0.0)
    with pytest.raises(ConfigError, match="tokens must be a whole number"):
        prefill_flops(LLAMA70, -1)
    with pytest.raises(ConfigError, match="cached must be a whole number"):
        prefill_flops(LLAMA70, 1, cached=-1)
    with pytest.raises(ConfigError, match="at least 1 for a break-even"):
        break_even_bandwidth(LLAMA70, 0, FOUR_H100)
    with pytest.raises(ConfigError, match="bandwidth_bytes_per_s"):
        meeting_point(LLAMA70, 10, 0.0, FOUR_H100)


def test_published_rates_are_dense_and_sourced() -> None:
    known = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "MI300X": 1307.4e12, "B200": 2250e12}
    assert {name: find_gpu(name).bf16_flops_per_s for name in known} == known
    for gpu in GPUS:
        assert gpu.source
        if gpu.fp8_flops_per_s is not None:  # every generation doubles its rate from bf16 to fp8
            assert gpu.fp8_flops_per_s == pytest.approx(2 * gpu.bf16_flops_per_s, rel=0.02)


def test_gpus_are_found_by_any_case_and_unknown_ones_are_refused() -> None:
    assert find_gpu("h100 sxm").name == "H100"
    assert find_gpu("mi300x").name == "MI300X"
    with pytest.raises(ConfigError, match=r"unknown GPU 'H101'; did you mean 'H100'"):
        find_gpu("H101")
    with pytest.raises(ConfigError, match="publishes no peak FLOP/s for it; give its peak"):
        find_gpu("MI308X")
