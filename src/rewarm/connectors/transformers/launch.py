"""The lines of Python that keep a model's prefixes in a store, and a try of everything that they depend on.

Builds text and tries parts; loads no weights, makes no pool. The round trip generates with a model of a few thousand
weights over a store in memory.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec

from rewarm.connectors.checking import Check, attempt
from rewarm.connectors.places import check_lasting, try_directories, try_pools
from rewarm.connectors.transformers.identity import engine_version
from rewarm.errors import ConfigError

SNIPPET = """\
from transformers import AutoModelForCausalLM

from rewarm.connectors.transformers import PrefixCache

model = AutoModelForCausalLM.from_pretrained({model}, dtype="auto").eval()
with PrefixCache({url}, model{namespace}) as cache:
    output = cache.generate(input_ids, attention_mask=attention_mask, max_new_tokens=64)
"""


class Snippet(msgspec.Struct, frozen=True, kw_only=True):
    """What to write instead of `model.generate(..)`."""

    command: str
    notes: list[str]


def snippet(url: str, *, model: str | None = None, namespace: str | None = None) -> Snippet:
    """The lines for a store. Raises `ConfigError` for one that ends with the process."""
    check_lasting(url)
    code = SNIPPET.format(
        url=json.dumps(url),
        model=json.dumps(model or "MODEL"),
        namespace="" if namespace is None else f", namespace={json.dumps(namespace)}",
    )
    note = "Rewarm must be installed in the same environment: pip install rewarm"
    return Snippet(command=code.rstrip(), notes=[note])


def run_checks(url: str, model: str | None) -> Iterator[Check]:
    """Try the parts one after the other. `model` is a directory or a name; only its configuration is read."""
    yield from attempt(
        [
            ("engine", lambda: f"Transformers {engine_version()}"),
            ("round trip", _round_trip),
            ("directory", lambda: try_directories(url)),
            ("pool", lambda: try_pools(url)),
            *([("model", lambda: _model(model))] if model else []),
        ]
    )


def _round_trip() -> str:
    """The same answer computed and restored."""
    engine_version()
    transformers, torch = _import("transformers"), _import("torch")
    package = importlib.import_module("rewarm.connectors.transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = (torch.arange(70) % 60)[None]
    with package.PrefixCache("memory:", model, block_tokens=16) as cache:
        answers = []
        for _ in range(2):
            answers.append(cache.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=63))
            cache.flush()
        restored = cache.stats().restored_tokens
    if restored != 64 or not answers[0].equal(answers[1]):
        raise ConfigError(f"{restored} of 64 tokens were restored; this Transformers keeps its cache in another way")
    return f"{restored} tokens restored, the same answer"


def _model(model: str) -> str:
    """Whether the layers that a configuration names can be kept. Weights are not read."""
    transformers = _import("transformers")
    layers = importlib.import_module("rewarm.connectors.transformers.layers")
    try:
        config = transformers.AutoConfig.from_pretrained(model, local_files_only=True)
        cache = transformers.DynamicCache(config=config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the configuration of {model!r} cannot be read here: {error}") from error
    if config.is_encoder_decoder:
        raise ConfigError(f"{model} is an encoder and a decoder: its cache is not that of a prompt's prefix")
    for index, layer in enumerate(cache.layers):
        layers.check_kind(index, layer, model)
    return f"{len(cache.layers)} layers that can be kept"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported here: {error}") from error
