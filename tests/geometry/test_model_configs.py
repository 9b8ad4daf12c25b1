"""A configuration file of every architecture, read from disk, and what is refused in one."""

from __future__ import annotations

import json
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from rewarm.errors import ConfigError
from rewarm.geometry import DType, LayerKind, Model, bytes_per_token, bytes_total, load_model, supported_architectures
from rewarm.geometry.architectures import model_from_config
from rewarm.geometry.presets import preset_names

CONFIGS = Path(__file__).parent / "configs"
PRESETS = tomllib.loads((resources.files("rewarm.geometry") / "presets.toml").read_text())

# file: (bytes one more token adds, bytes of 10,000 tokens), the arithmetic written out
EXPECTED = {
    "llama_mha": (2 * 32 * 32 * 128 * 2, 2 * 32 * 32 * 128 * 2 * 10_000),  # no num_key_value_heads: as many as heads
    "llama_gqa": (2 * 28 * 8 * 128 * 2, 2 * 28 * 8 * 128 * 2 * 10_000),
    "mistral_window": (0, 2 * 32 * 8 * 128 * 2 * 4096),  # every layer forgets
    "mistral_full": (2 * 40 * 8 * 128 * 2, 2 * 40 * 8 * 128 * 2 * 10_000),  # head_dim is not 5120 / 32
    "mistral3": (2 * 40 * 8 * 128 * 2, 2 * 40 * 8 * 128 * 2 * 10_000),
    "mixtral": (2 * 32 * 8 * 128 * 2, 2 * 32 * 8 * 128 * 2 * 10_000),
    "phi3": (0, 2 * 32 * 32 * 96 * 2 * 2047),
    "qwen2": (2 * 28 * 4 * 128 * 2, 2 * 28 * 4 * 128 * 2 * 10_000),  # sliding_window is there but switched off
    "qwen2_window": (2 * 21 * 4 * 128 * 2, 2 * 4 * 128 * 2 * (21 * 10_000 + 7 * 2048)),  # layers 21 to 27 have it
    "qwen2_moe": (2 * 24 * 16 * 128 * 2, 2 * 24 * 16 * 128 * 2 * 10_000),
    "qwen3": (2 * 36 * 8 * 128 * 2, 2 * 36 * 8 * 128 * 2 * 10_000),
    "qwen3_layer_types": (2 * 2 * 8 * 128 * 2, 2 * 8 * 128 * 2 * (2 * 10_000 + 2 * 512)),
    "qwen3_moe": (2 * 48 * 4 * 128 * 2, 2 * 48 * 4 * 128 * 2 * 10_000),
    "qwen3_next": (
        2 * 2 * 2 * 256 * 2,
        2 * 2 * 2 * 256 * 2 * 10_000 + 6 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2),
    ),
    "gemma2": (2 * 21 * 8 * 256 * 4, 2 * 8 * 256 * 4 * 21 * (10_000 + 4096)),  # float32, odd layers are full
    "gemma3_text": (2 * 4 * 1 * 256 * 2, 2 * 256 * 2 * (4 * 10_000 + 22 * 512)),  # layers 6, 12, 18, 24 are full
    "gemma3": (2 * 5 * 4 * 256 * 2, 2 * 4 * 256 * 2 * (5 * 10_000 + 29 * 1024)),  # heads left out: 4 of 256
    "gpt_oss": (2 * 2 * 8 * 64 * 2, 2 * 8 * 64 * 2 * (2 * 10_000 + 2 * 128)),
    "glm4_moe": (2 * 46 * 8 * 128 * 2, 2 * 46 * 8 * 128 * 2 * 10_000),
    "minimax_m2": (2 * 62 * 8 * 128 * 2, 2 * 62 * 8 * 128 * 2 * 10_000),
    "deepseek_v2": (27 * (512 + 64) * 2, 27 * (512 + 64) * 2 * 10_000),
    "deepseek_v3": (61 * (512 + 64) * 2, 61 * (512 + 64) * 2 * 10_000),  # the draft layer is no part of the cache
    "deepseek_v32": (61 * (512 + 64 + 128) * 2, 61 * (512 + 64 + 128) * 2 * 10_000),
    "kimi_k2": (61 * (512 + 64) * 2, 61 * (512 + 64) * 2 * 10_000),
    "kimi_k25": (61 * (512 + 64) * 2, 61 * (512 + 64) * 2 * 10_000),
}

# Published counts of active parameters, for configurations that are a published model's
ACTIVE = {
    "llama_mha": 6.74e9,
    "mistral_window": 7.24e9,
    "mixtral": 12.9e9,
    "phi3": 3.82e9,
    "qwen2": 7.62e9,
    "qwen2_moe": 2.7e9 - 151_936 * 2048,  # published with the input embedding
    "qwen3": 4.0e9,
    "glm4_moe": 12e9,
    "minimax_m2": 10e9,
    "deepseek_v2": 2.4e9,
    "deepseek_v3": 37e9,
    "kimi_k2": 32e9,
}


def config_of(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def read(config: dict[str, Any]) -> Model:
    return model_from_config(config, "test", "test.json")


def changed(name: str, **changes: Any) -> Model:
    return read(config_of(name) | changes)


def without(name: str, *fields: str) -> Model:
    return read({key: value for key, value in config_of(name).items() if key not in fields})


def test_there_is_a_configuration_of_every_architecture() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(EXPECTED)
    assert {load_model(CONFIGS / f"{name}.json").architecture for name in EXPECTED} == set(supported_architectures())


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_of_every_architecture(name: str) -> None:
    model = load_model(CONFIGS / f"{name}.json")
    assert (bytes_per_token(model), bytes_total(model, 10_000)) == EXPECTED[name]
    assert model.name == name


@pytest.mark.parametrize("name", ACTIVE)
def test_the_estimate_of_active_parameters_is_near_the_published_count(name: str) -> None:
    model = load_model(CONFIGS / f"{name}.json")
    assert model.active_parameters_source == "estimated"
    assert model.active_parameters == pytest.approx(ACTIVE[name], rel=0.12)


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "tiny-demo"])
def test_the_estimate_is_near_the_published_count_of_every_preset(name: str) -> None:
    entry = PRESETS[name]
    if "active_parameters" in entry:
        estimate = read(entry["config"]).active_parameters
        assert estimate == pytest.approx(entry["active_parameters"], rel=0.08)


def test_a_directory_and_its_file_are_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "qwen3.json").read_text())
    assert load_model(folder) == load_model(str(folder / "config.json"))
    assert load_model(folder).name == "My-Model"


def test_what_is_on_disk_comes_before_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B" / "config.json").write_text((CONFIGS / "qwen3.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert load_model("Llama-3.1-8B").architecture == "Qwen3ForCausalLM"


def test_dtype_names() -> None:
    assert changed("llama_gqa", torch_dtype="float16").kv_dtype is DType.FP16
    assert changed("llama_gqa", torch_dtype=None, dtype="float32").kv_dtype is DType.FP32
    assert without("llama_gqa", "torch_dtype").kv_dtype is DType.BF16
    assert without("gemma3", "torch_dtype").kv_dtype is DType.BF16
    with pytest.raises(ConfigError, match="unknown KV cache dtype 'int7'"):
        changed("llama_gqa", torch_dtype="int7")


def test_class_defaults_where_the_file_is_silent() -> None:
    mistral = without("mistral_window", "sliding_window")  # absent is the class's 4096, null is none
    assert {layer.window for layer in mistral.layers} == {4096}
    assert changed("mistral_window", sliding_window=None).layer_counts() == {"full": 32}
    assert without("qwen3", "head_dim").layers[0].key_dim == 128  # and not 2560 / 32
    assert without("qwen2_window", "max_window_layers").layer_counts() == {"full": 28}
    assert without("gemma3_text", "sliding_window_pattern").layer_counts() == {"full": 4, "sliding_window": 22}
    assert without("gpt_oss", "layer_types").layer_counts() == {"full": 2, "sliding_window": 2}
    assert without("qwen3_next", "full_attention_interval").layer_counts() == {"full": 2, "linear": 6}


def test_the_kind_of_each_layer_follows_the_rule() -> None:
    full, sliding = LayerKind.FULL, LayerKind.SLIDING
    assert [layer.kind for layer in changed("gemma2", num_hidden_layers=4).layers] == [sliding, full, sliding, full]
    pattern = changed("gemma3_text", num_hidden_layers=5, sliding_window_pattern=3)
    assert [layer.kind for layer in pattern.layers] == [sliding, sliding, full, sliding, sliding]
    alternate = changed("qwen2_moe", use_sliding_window=True, sliding_window=64, max_window_layers=3)
    assert [layer.kind for layer in alternate.layers[:5]] == [sliding, full, sliding, full, full]
    everywhere = changed("qwen3_moe", use_sliding_window=True, sliding_window=64)
    assert {layer.kind for layer in everywhere.layers} == {sliding}


def test_only_one_of_architectures_and_model_type_is_enough() -> None:
    assert without("qwen3", "model_type") == without("qwen3", "architectures") == changed("qwen3")
    with pytest.raises(ConfigError, match=r"test.json: architectures and model_type are missing"):
        without("qwen3", "model_type", "architectures")


@pytest.mark.parametrize("name", ["JambaForCausalLM", "Llama4ForConditionalGeneration", "LlamaModel"])
def test_an_unknown_architecture_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"architecture '{name}' is not understood.*LlamaForCausalLM"):
        changed("llama_gqa", architectures=[name])


def test_an_unknown_model_type_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model_type 'jamba' is not understood.*LlamaForCausalLM"):
        changed("llama_gqa", model_type="jamba")
    with pytest.raises(ConfigError, match="model_type is 'qwen3', which does not go with architecture 'LlamaForCau"):
        changed("llama_gqa", model_type="qwen3")


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("value", [0, -1, 2.5, "32", True, 10**12, [32]])
def test_absurd_layer_counts_are_refused_by_field(name: str, value: object) -> None:
    config = config_of(name)
    (config.get("text_config") or config)["num_hidden_layers"] = value
    with pytest.raises(ConfigError, match=r"test.json.*num_hidden_layers"):
        read(config)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama_gqa", {"num_attention_heads": None}, "num_attention_heads is missing"),
    ("llama_gqa", {"num_attention_heads": 0}, "num_attention_heads must be from 1"),
    ("llama_gqa", {"num_key_value_heads": 7}, r"num_key_value_heads \(7\) does not divide num_attention_heads \(24\)"),
    ("llama_gqa", {"num_key_value_heads": 48}, "num_key_value_heads"),
    ("llama_gqa", {"head_dim": -128}, "head_dim must be from 1"),
    ("llama_gqa", {"head_dim": 1 << 20}, "head_dim must be from 1"),
    (
        "llama_gqa",
        {"head_dim": None, "hidden_size": 3073},
        r"hidden_size \(3073\) is no multiple of num_attention_heads",
    ),
    ("llama_gqa", {"head_dim": None, "hidden_size": None}, "hidden_size is missing"),
    ("llama_gqa", {"layer_types": ["sliding_attention"] * 28}, "layer_types differs"),
    ("llama_gqa", {"max_position_embeddings": -1}, "max_position_embeddings"),
    ("llama_gqa", {"torch_dtype": 16}, "torch_dtype must be a string"),
    ("llama_gqa", {"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
    ("llama_gqa", {"model_type": ["llama"]}, "model_type must be a string"),
    ("llama_gqa", {"text_config": "x"}, "text_config must be an object"),
    ("llama_gqa", {"vocab_size": "many"}, "vocab_size must be a whole number"),
    ("mistral_window", {"sliding_window": 0}, "sliding_window must be from 1"),
    ("mistral_window", {"sliding_window": [1, 2]}, "sliding_window must be a whole number"),
    ("qwen2_window", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
    ("qwen2", {"num_key_value_heads": None}, "num_key_value_heads"),  # the class's 32 cannot serve 28 heads
    (
        "qwen3_layer_types",
        {"layer_types": ["full_attention"] * 3},
        "layer_types has 3 entries for num_hidden_layers = 4",
    ),
    ("qwen3_layer_types", {"layer_types": ["full_attention", "magic"] * 2}, "layer_types has 'magic'"),
    ("qwen3_layer_types", {"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention"),
    ("qwen3_layer_types", {"layer_types": "full"}, "layer_types must be a list"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 8}, "layer_types has sliding_attention"),
    ("qwen3_next", {"linear_num_value_heads": 33}, r"linear_num_value_heads \(33\)"),
    ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim is missing"),
    ("qwen3_moe", {"num_experts_per_tok": 129}, r"num_experts_per_tok \(129\) is more"),
    ("qwen3_moe", {"mlp_only_layers": [48]}, "mlp_only_layers must be a list of layer indexes below 48"),
    ("gemma3", {"text_config": None}, "text_config is missing"),
    ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ("deepseek_v3", {"qk_rope_head_dim": 0}, "qk_rope_head_dim must be from 1"),
    ("deepseek_v3", {"index_head_dim": 128}, "index_head_dim asks for a sparse indexer"),
    ("deepseek_v32", {"index_topk": None}, "index_topk is missing"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_contradictions_are_refused_by_field(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"test.json: {message}"):
        changed(name, **changes)


def test_a_field_of_the_text_part_is_named_with_its_part() -> None:
    config = config_of("gemma3")
    config["text_config"]["sliding_window"] = -5
    with pytest.raises(ConfigError, match=r"test.json: text_config: sliding_window must be from 1"):
        read(config)


def test_a_configuration_without_sizes_of_weights_has_unknown_active_parameters() -> None:
    model = without("llama_gqa", "intermediate_size", "vocab_size")
    assert (model.active_parameters, model.active_parameters_source) == (None, "unknown")
    assert bytes_per_token(model) == EXPECTED["llama_gqa"][0]


BROKEN_FILES = {
    "empty": b"",
    "text": b"hello",
    "list": b"[1, 2]",
    "cut": b'{"architectures": ["Llama',
    "twice": b'{"model_type": "llama", "model_type": "qwen3"}',
    "nan": b'{"model_type": "llama", "rope_theta": NaN}',
    "not utf-8": b'{"model_type": "\xff\xfe"}',
    "deep": b'{"a":' * 100_000,
    "long number": b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}",
    "huge": b'{"a": "' + b"x" * (5 << 20) + b'"}',
}


@pytest.mark.parametrize("kind", BROKEN_FILES)
def test_a_broken_file_is_refused_by_its_path(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(BROKEN_FILES[kind])
    with pytest.raises(ConfigError, match=r"config.json"):
        load_model(file)


def test_a_directory_without_a_configuration_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        load_model(tmp_path)
    os.mkfifo(tmp_path / "config.json")  # opening it would wait for a writer
    with pytest.raises(ConfigError):
        load_model(tmp_path)
