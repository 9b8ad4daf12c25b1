"""Which model an SGLang engine serves, as a namespace: SGLang's page hashes cover tokens and a request's salt, no more.

In the engine the model and what was changed of it come from the engine's own arguments. `"model": "<directory>"` in the
backend's configuration names it where they cannot be had, `"namespace": "<name>"` takes the place of all of it.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarm.connectors.common import version_of
from rewarm.connectors.vllm.identity import NAMED_SCHEMA
from rewarm.errors import ConfigError
from rewarm.geometry.fields import read_config
from rewarm.geometry.fingerprint import commit_of, weights_fingerprint
from rewarm.geometry.namespace import Namespace, model_namespace

SUPPORTED = ("0.5",)
"""Minor versions whose storage interface this implements."""
GIVE_A_NAME = 'add "namespace": "<name>" to the backend\'s configuration to answer for what shares its pages yourself'
OVERRIDES = (
    "quantization",
    "quantization_param_path",
    "dtype",
    "kv_cache_dtype",
    "json_model_override_args",
    "context_length",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_algorithm",
    "weight_version",
)
"""Arguments of the engine that change the bytes of a page, or may."""


def installed_version() -> str | None:
    """The version of SGLang here; None without one. Imports nothing."""
    return version_of("sglang")


def check_version(version: str) -> str:
    """A supported version. Raises `ConfigError` with the list."""
    if re.match(r"\d+\.\d+", version) is None or ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(f"SGLang {version} is not supported by this Rewarm; supported: {', '.join(SUPPORTED)}")
    return version


def namespace_of(options: Mapping[str, Any], config: Any, shape: Mapping[str, Any]) -> Namespace:
    """The namespace of a backend: `options` are its own, `config` is the engine's `HiCacheStorageConfig`.

    `shape` describes the pages of the main pool, as JSON values, without what differs between ranks. Raises
    `ConfigError` naming what is not known.
    """
    parts = {
        "engine": f"sglang {check_version(installed_version() or 'without a version')}",
        "shape": dict(shape),
        "ranks": [config.tp_size, config.pp_size, config.attn_cp_size, getattr(config, "dcp_size", 1)],
        "replicated": bool(config.is_mla_model),
    }
    name = options.get("namespace")
    if name is not None:
        if not str(name).strip():
            raise ConfigError("the backend's namespace is empty; leave it out, or give a name")
        named = {"schema": NAMED_SCHEMA, "name": str(name), **parts}
        return Namespace(json.dumps(named, sort_keys=True, separators=(",", ":")))
    arguments = server_arguments()
    model = options.get("model") or arguments.get("model_path")
    if not model:
        raise ConfigError(
            f'the engine does not say which model it serves: add "model": "<directory>", or {GIVE_A_NAME}'
        )
    _check_arguments(arguments)
    directory = find_weights(str(model), arguments.get("revision"))
    overrides = {field: _plain(arguments[field]) for field in OVERRIDES if arguments.get(field) is not None}
    draft = arguments.get("speculative_draft_model_path")
    if draft:
        overrides["draft"] = list(weights_of(find_weights(str(draft), None)))
    commit, fingerprint = weights_of(directory)
    return model_namespace(
        config=read_config(directory),
        commit=commit,
        fingerprint=fingerprint,
        overrides={**overrides, **parts},
        kv_dtype=_element(str(shape["dtype"])),
        block_tokens=shape["page"][0],
        layout=shape["pool"][2],
        tp=config.tp_size,
        pp=config.pp_size,
        rank_split=not config.is_mla_model,
    )


def weights_of(directory: Path) -> tuple[str | None, str | None]:
    """(commit, fingerprint) of the weights in a directory; one of them is known."""
    commit = commit_of(directory)
    return commit, None if commit else weights_fingerprint(directory)


def find_weights(model: str, revision: str | None) -> Path:
    """The directory of a model, or of its snapshot in the Hugging Face cache. Raises `ConfigError`."""
    if Path(model).is_dir():
        return Path(model)
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=revision, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"the weights of {model!r} are not known: it is no directory here and not in the Hugging Face cache; "
            f"give the directory, or {GIVE_A_NAME}"
        ) from error


def server_arguments() -> dict[str, Any]:
    """The arguments that this process's engine was started with; empty outside of an engine."""
    try:
        arguments = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return {}
    fields = ("model_path", "revision", "load_format", "enable_lora", "lora_paths", "speculative_draft_model_path")
    return {name: getattr(arguments, name, None) for name in (*fields, *OVERRIDES)}


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    if arguments.get("enable_lora") or arguments.get("lora_paths"):
        raise ConfigError(f"LoRA adapters are on: SGLang's hashes name them but not their weights; {GIVE_A_NAME}")
    if "dummy" in str(arguments.get("load_format")):
        raise ConfigError(f"the weights are dummies that no file stands for; {GIVE_A_NAME}")


def _element(dtype: str) -> str:
    """The element type in Rewarm's words; packed caches are bytes to SGLang, told apart by their shape."""
    plain = dtype.removeprefix("torch.")
    return "fp8" if plain in ("uint8", "int8") else plain


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, bool, int, float)) else str(value)
