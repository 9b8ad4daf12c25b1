"""The architectures that Rewarm understands, and how a configuration of each becomes a `Model`.

An architecture that is not in the table is refused by its name: the size of a cache is never guessed from fields that
happen to look familiar. Defaults are those of the configuration classes in Hugging Face `transformers` 5.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from rewarm.errors import ConfigError
from rewarm.geometry import layers as rules
from rewarm.geometry.dtypes import DType, parse_dtype
from rewarm.geometry.fields import TOKENS_MAX, Fields
from rewarm.geometry.layers import Defaults, LayerReader, attention_layers
from rewarm.geometry.model import Model
from rewarm.geometry.parameters import active_parameters


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """How one `model_type` is read. `architecture` is its causal language model class."""

    architecture: str
    read: LayerReader
    defaults: Defaults = Defaults()
    experts: bool = False
    gated_output: bool = False


_GROUPED = attention_layers(rules.no_window, honours_layer_types=False)
_TAIL = attention_layers(rules.switched_tail, honours_layer_types=True)
_ALTERNATE = attention_layers(rules.window_pattern(2), honours_layer_types=True)
_GEMMA3 = attention_layers(rules.window_pattern(6), honours_layer_types=True)
_WINDOW_IF_SET = attention_layers(rules.window_everywhere(assumed=False), honours_layer_types=False)
_DELTA_NET = Defaults(kv_heads=2, head_dim=256)

FAMILIES: dict[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", read=_GROUPED),
    "mistral": Family(
        architecture="MistralForCausalLM",
        read=attention_layers(rules.window_everywhere(assumed=True), honours_layer_types=False),
        defaults=Defaults(kv_heads=8, window=4096),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM", read=_WINDOW_IF_SET, defaults=Defaults(kv_heads=8), experts=True
    ),
    "phi3": Family(architecture="Phi3ForCausalLM", read=_WINDOW_IF_SET),
    "qwen2": Family(architecture="Qwen2ForCausalLM", read=_TAIL, defaults=Defaults(kv_heads=32, window=4096)),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        read=attention_layers(rules.switched_alternate, honours_layer_types=True),
        defaults=Defaults(kv_heads=16, window=4096),
        experts=True,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", read=_TAIL, defaults=Defaults(kv_heads=32, head_dim=128, window=4096)
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        read=attention_layers(rules.switched_everywhere, honours_layer_types=False),
        defaults=Defaults(kv_heads=4, window=4096),
        experts=True,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        read=rules.delta_net_layers,
        defaults=_DELTA_NET,
        experts=True,
        gated_output=True,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        read=_ALTERNATE,
        defaults=Defaults(query_heads=8, kv_heads=4, head_dim=256, window=4096),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        read=_GEMMA3,
        defaults=Defaults(query_heads=8, kv_heads=4, head_dim=256, window=4096),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        read=_ALTERNATE,
        defaults=Defaults(kv_heads=8, head_dim=64, window=128),
        experts=True,
    ),
    "glm4_moe": Family(architecture="Glm4MoeForCausalLM", read=_GROUPED, defaults=Defaults(kv_heads=8), experts=True),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM", read=_GROUPED, defaults=Defaults(kv_heads=8, head_dim=128), experts=True
    ),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", read=rules.latent_layers, experts=True),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", read=rules.latent_layers, experts=True),
    "kimi_k2": Family(architecture="DeepseekV3ForCausalLM", read=rules.latent_layers, experts=True),
    "deepseek_v32": Family(architecture="DeepseekV32ForCausalLM", read=rules.indexed_layers, experts=True),
}

_WRAPPERS = {
    "Gemma3ForConditionalGeneration": ("gemma3", ("gemma3_text",)),
    "Mistral3ForConditionalGeneration": ("mistral3", ("mistral",)),
    "KimiK25ForConditionalGeneration": ("kimi_k25", ("kimi_k2", "deepseek_v3")),
}
"""Models of several modalities: the model_type of the whole, and those their `text_config` may have."""


def supported_architectures() -> tuple[str, ...]:
    """Names of the classes that are understood, sorted."""
    return tuple(sorted({family.architecture for family in FAMILIES.values()} | set(_WRAPPERS)))


def model_from_config(config: Mapping[str, Any], name: str, where: str) -> Model:
    """The model of a `config.json` that is already an object. Raises `ConfigError` naming `where` and the field."""
    top = Fields(config, where)
    fields = top.nested("text_config") or top
    architecture, model_type = _identify(top, fields)
    family = FAMILIES[model_type]
    layers = family.read(fields, family.defaults)
    active = active_parameters(fields, layers, experts=family.experts, gated_output=family.gated_output)
    return Model(
        name=name,
        architecture=architecture,
        layers=layers,
        active_parameters=active,
        active_parameters_source="unknown" if active is None else "estimated",
        kv_dtype=_dtype(top, fields),
        state_dtype=parse_dtype(fields.text("mamba_ssm_dtype") or DType.FP32),
        context_tokens=fields.maybe("max_position_embeddings", most=TOKENS_MAX),
    )


def _dtype(top: Fields, fields: Fields) -> DType:
    """The model's own dtype, which an engine's "auto" follows; bf16 where the file does not say."""
    names = (part.text(key) for part in (fields, top) for key in ("dtype", "torch_dtype"))
    return parse_dtype(next((name for name in names if name and name != "auto"), DType.BF16))


def _identify(top: Fields, fields: Fields) -> tuple[str, str]:
    """(architecture, model_type) of a configuration; refused by name when either is unknown or they disagree."""
    named = top.strings("architectures") or fields.strings("architectures") or ()
    model_type = fields.text("model_type")
    if not named:
        if model_type is None:
            raise top.refuse("architectures", f"and model_type are missing; {_choices()}")
        _check_known(model_type, top)
        return FAMILIES[model_type].architecture, model_type
    architecture = named[0]
    allowed = _model_types(architecture)
    if not allowed:
        near = difflib.get_close_matches(architecture, supported_architectures(), n=1)
        hint = f"the nearest understood one is {near[0]}; " if near else ""
        raise ConfigError(f"{top.where}: architecture {architecture!r} is not understood; {hint}{_choices()}")
    if architecture in _WRAPPERS and fields is top:
        raise top.refuse("text_config", f"is missing, and {architecture} needs it")
    if model_type is not None and model_type not in allowed:
        _check_known(model_type, top)
        raise fields.refuse("model_type", f"is {model_type!r}, which does not go with architecture {architecture!r}")
    return architecture, model_type or allowed[0]


def _model_types(architecture: str) -> tuple[str, ...]:
    if architecture in _WRAPPERS:
        return _WRAPPERS[architecture][1]
    return tuple(name for name, family in FAMILIES.items() if family.architecture == architecture)


def _check_known(model_type: str, top: Fields) -> None:
    if model_type not in FAMILIES:
        raise ConfigError(f"{top.where}: model_type {model_type!r} is not understood; {_choices()}")


def _choices() -> str:
    return f"understood: {', '.join(supported_architectures())}"
