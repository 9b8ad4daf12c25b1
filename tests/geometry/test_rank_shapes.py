"""Sizes and shapes under parallelism: properties that hold for every model, and splits that are refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.geometry import (
    DType,
    Layer,
    LayerKind,
    Model,
    RankShape,
    block_bytes,
    bytes_per_rank_token,
    bytes_per_rank_total,
    bytes_per_token,
    bytes_total,
    load_model,
    parse_dtype,
    rank_shapes,
    state_bytes,
)

POWERS = st.sampled_from([1, 2, 4, 8, 16])


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models of every mixture of layers, with head counts that are powers of two, as real ones mostly are."""
    kv_heads = draw(POWERS)
    heads = kv_heads * draw(POWERS)
    width = draw(st.sampled_from([64, 96, 128]))
    values = draw(st.just(width) | POWERS)
    full = Layer(kind=LayerKind.FULL, query_heads=heads, kv_heads=kv_heads, key_dim=width, value_dim=values)
    state = Layer(kind=LayerKind.LINEAR, query_heads=16, kv_heads=32, conv_elements=24_576, state_elements=524_288)
    kinds = [
        full,
        msgspec.structs.replace(full, kind=LayerKind.SLIDING, window=draw(st.integers(1, 5000))),
        Layer(kind=LayerKind.MLA, query_heads=heads, key_dim=192, value_dim=128, latent_dim=512, rope_dim=64),
        Layer(
            kind=LayerKind.MLA, query_heads=heads, key_dim=192, value_dim=128, latent_dim=512, rope_dim=64,
            index_dim=128, index_heads=64, index_topk=2048,
        ),
        state,
    ]  # fmt: skip
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    return Model(
        name="m", architecture="a", layers=tuple(layers), active_parameters=10**9, active_parameters_source="published"
    )


def fits(model: Model, tp: int, pp: int) -> bool:
    return pp <= len(model.layers) and all(layer.query_heads % tp == 0 for layer in model.layers)


@given(models(), POWERS, st.integers(1, 4), st.sampled_from(list(DType)), st.integers(1, 64))
def test_the_ranks_that_are_no_replicas_hold_each_byte_once(
    model: Model, tp: int, pp: int, dtype: DType, block_tokens: int
) -> None:
    if not fits(model, tp, pp):
        return
    shapes = rank_shapes(model, tp, pp, block_tokens=block_tokens, kv_dtype=dtype)
    assert [shape.rank for shape in shapes] == list(range(tp * pp))
    if len({(layer.kind is LayerKind.MLA, layer.kv_heads) for layer in model.layers if not layer.state_elements}) == 1:
        originals = [shape for shape in shapes if shape.replica_of is None]
        assert sum(shape.block_bytes for shape in originals) == block_bytes(model, block_tokens, kv_dtype=dtype)
    per_layer = sorted(index for shape in shapes if shape.tp_rank == 0 for g in shape.groups for index in g.layers)
    assert per_layer == [i for i, layer in enumerate(model.layers) if layer.kind is not LayerKind.LINEAR]
    assert sum(shape.state_bytes for shape in shapes) == state_bytes(model, dtype)
    assert max(shape.block_bytes for shape in shapes) == block_bytes(model, block_tokens, tp, pp, dtype)


@given(models(), POWERS, st.integers(1, 4), st.integers(0, 10_000), st.integers(0, 10_000))
def test_totals_grow_with_tokens_and_ranks_cover_them(model: Model, tp: int, pp: int, n: int, more: int) -> None:
    assert bytes_total(model, n) <= bytes_total(model, n + more)
    assert bytes_total(model, n + more) - bytes_total(model, n) >= more * bytes_per_token(model)
    if fits(model, tp, pp):
        rank = bytes_per_rank_total(model, n, tp, pp)
        assert bytes_total(model, n) <= rank * tp * pp
        assert rank <= bytes_total(model, n)
        assert bytes_per_token(model) <= bytes_per_rank_token(model, tp, pp) * tp * pp
    if fits(model, 2 * tp, pp):
        assert bytes_per_rank_token(model, tp, pp) >= bytes_per_rank_token(model, 2 * tp, pp)


@given(models(), st.integers(0, 100_000))
def test_beyond_every_window_each_token_adds_the_marginal_bytes(model: Model, beyond: int) -> None:
    start = 5000 + beyond
    assert bytes_total(model, start + 7) - bytes_total(model, start) == 7 * bytes_per_token(model)


@given(models(), st.integers(1, 100_000))
def test_bytes_follow_the_width_of_the_dtype(model: Model, tokens: int) -> None:
    plain = msgspec.structs.replace(model, index_dtype=DType.FP8, state_dtype=DType.FP8)
    wide = msgspec.structs.replace(model, index_dtype=DType.BF16, state_dtype=DType.BF16)
    assert bytes_total(wide, tokens, "bf16") == 2 * bytes_total(plain, tokens, "fp8")
    assert bytes_total(wide, tokens, DType.FP16) == bytes_total(wide, tokens, "bfloat16")


def test_heads_are_split_while_there_are_enough_and_replicated_beyond() -> None:
    model = load_model("Qwen3-235B-A22B")  # 4 key/value heads, 94 layers
    one_head = 2 * 94 * 1 * 128 * 2
    assert [bytes_per_rank_token(model, tp=tp) for tp in (1, 2, 4, 8, 16)] == [
        4 * one_head,
        2 * one_head,
        one_head,
        one_head,
        one_head,
    ]
    assert bytes_per_token(model) == 4 * one_head  # whatever the ranks
    shapes = rank_shapes(model, tp=8)
    assert [shape.groups[0].kv_head_first for shape in shapes] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [shape.replica_of for shape in shapes] == [None, 0, None, 2, None, 4, None, 6]


def test_a_latent_is_stored_once_per_stage() -> None:
    shapes = rank_shapes(load_model("DeepSeek-V3"), tp=4, pp=2, block_tokens=64)
    assert [shape.replica_of for shape in shapes] == [None, 0, 0, 0, None, 4, 4, 4]
    assert {shape.block_bytes for shape in shapes[:4]} == {31 * 576 * 2 * 64}
    assert {shape.block_bytes for shape in shapes[4:]} == {30 * 576 * 2 * 64}
    assert (shapes[0].groups[0].kv_heads, shapes[0].groups[0].key_dim, shapes[0].groups[0].value_dim) == (1, 576, 0)


def test_shapes_of_a_rank_with_windows() -> None:
    shape = rank_shapes(load_model("gpt-oss-120b"), tp=4, pp=2, block_tokens=16)[1]
    assert isinstance(shape, RankShape)
    assert (shape.rank, shape.tp_rank, shape.pp_rank, shape.layer_first, shape.layer_count) == (1, 1, 0, 0, 18)
    sliding, full = shape.groups
    assert (sliding.kind, sliding.window, sliding.layers) == (LayerKind.SLIDING, 128, tuple(range(0, 18, 2)))
    assert (full.kind, full.window, full.layers) == (LayerKind.FULL, 0, tuple(range(1, 18, 2)))
    assert (full.kv_heads, full.kv_head_first, full.key_dim, full.value_dim) == (2, 2, 64, 64)
    assert full.bytes_per_layer == 16 * 2 * 2 * 64 * 2
    assert shape.block_bytes == 18 * full.bytes_per_layer


def test_stages_that_do_not_divide_go_before_the_last() -> None:
    model = load_model("DeepSeek-V3")  # 61 layers
    counts = [shape.layer_count for shape in rank_shapes(model, pp=8)]
    assert counts == [7, 7, 8, 8, 8, 8, 8, 7]
    assert [shape.layer_first for shape in rank_shapes(model, pp=8)] == [0, 7, 14, 22, 30, 38, 46, 54]
    assert bytes_per_rank_token(model, pp=8) == 8 * 576 * 2


def test_a_state_is_split_over_ranks_and_is_no_block() -> None:
    model = load_model("Qwen3-Next-80B-A3B")
    shapes = rank_shapes(model, tp=4, block_tokens=16)
    assert {shape.state_bytes for shape in shapes} == {state_bytes(model) // 4}
    assert all(group.kind is LayerKind.FULL for shape in shapes for group in shape.groups)
    assert [shape.replica_of for shape in shapes] == [None, 0, None, 2]  # two heads on four ranks


REFUSED = [
    ("Llama-3.1-8B", {"tp": 3}, "tp=3 does not divide the 32 attention heads of Llama-3.1-8B"),
    ("Llama-3.1-8B", {"tp": 0}, "tp must be a whole number from 1"),
    ("Llama-3.1-8B", {"tp": True}, "tp must be a whole number from 1"),
    ("Llama-3.1-8B", {"tp": 64}, "tp=64 does not divide the 32 attention heads"),
    ("Llama-3.1-8B", {"tp": 10**9}, "tp must be a whole number from 1 to 4096"),
    ("Llama-3.1-8B", {"pp": 33}, r"pp=33 has more stages than Llama-3.1-8B has layers \(32\)"),
    ("Qwen3-Coder-480B-A35B", {"tp": 12}, "the 8 key/value heads of Qwen3-Coder-480B-A35B cannot be split"),
    ("DeepSeek-V3", {"tp": 7}, "tp=7 does not divide the 128 attention heads"),
]


@pytest.mark.parametrize(("name", "split", "message"), REFUSED)
def test_impossible_splits_are_refused(name: str, split: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bytes_per_rank_token(load_model(name), **split)
    with pytest.raises(ConfigError, match=message):
        rank_shapes(load_model(name), **split)


@pytest.mark.parametrize("block_tokens", [0, -16, 1.5, True, 1 << 30])
def test_impossible_blocks_are_refused(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="block_tokens must be a whole number"):
        block_bytes(load_model("tiny-demo"), block_tokens)


@pytest.mark.parametrize("tokens", [-1, 1.0, True, 1 << 60])
def test_impossible_lengths_are_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="tokens must be a whole number"):
        bytes_total(load_model("tiny-demo"), tokens)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", DType.FP8),
        ("FP8_E4M3", DType.FP8),
        ("float8_e4m3fn", DType.FP8),
        ("fp8_e5m2", DType.FP8_E5M2),
        ("torch.bfloat16", DType.BF16),
        ("BF16", DType.BF16),
        ("half", DType.FP16),
        ("float16", DType.FP16),
        ("fp32", DType.FP32),
        ("float", DType.FP32),
        (DType.BF16, DType.BF16),
    ],
)
def test_names_of_dtypes(name: str, dtype: DType) -> None:
    assert parse_dtype(name) is dtype


@pytest.mark.parametrize("name", ["", "auto", "bf17", "int8", None, 8])
def test_unknown_dtypes_are_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown KV cache dtype .*fp8, fp8_e5m2, bf16, fp16, fp32"):
        parse_dtype(name)
