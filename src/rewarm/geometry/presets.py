"""Finds a model: a `config.json`, a directory that has one, or a bundled preset by its name."""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from rewarm.errors import ConfigError
from rewarm.geometry.architectures import model_from_config
from rewarm.geometry.fields import read_config
from rewarm.geometry.model import Model


def load_model(name_or_path: str | Path) -> Model:
    """The model of a Hugging Face `config.json` (file or directory), or of a preset (any case, with or without owner).

    What exists on disk comes first, as in `transformers`. Raises `ConfigError`: no such file or preset (with the
    nearest name), an architecture that is not understood, a field that cannot be.
    """
    path = Path(name_or_path)
    text = str(name_or_path)
    if os.path.isfile(path) or os.path.isfile(path / "config.json"):
        return model_from_config(read_config(path), _name_of(path), text)
    name = _find(text)
    if name is not None:
        return _preset(name)
    raise ConfigError(_not_found(path, text))


def preset_names() -> tuple[str, ...]:
    """Names of the bundled presets, without their aliases."""
    return tuple(_presets())


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    file = resources.files("rewarm.geometry") / "presets.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@functools.cache
def _aliases() -> dict[str, str]:
    pairs = [(alias, name) for name, entry in _presets().items() for alias in [name, *entry.get("aliases", [])]]
    return {alias.lower(): name for alias, name in pairs}


@functools.cache
def _preset(name: str) -> Model:
    entry = _presets()[name]
    model = model_from_config(entry["config"], name, f"preset {name}")
    if "active_parameters" not in entry:
        return model
    return msgspec.structs.replace(
        model, active_parameters=entry["active_parameters"], active_parameters_source="published"
    )


def _find(text: str) -> str | None:
    """The preset called so; an owner in front ("meta-llama/Llama-3.1-8B") is left out."""
    aliases = _aliases()
    return aliases.get(text.lower()) or (aliases.get(text.lower().rsplit("/", 1)[-1]) if text.count("/") == 1 else None)


def _name_of(path: Path) -> str:
    file_in_directory = path.is_file() and path.name == "config.json"
    return path.resolve().parent.name if file_in_directory else (path.resolve().name if path.is_dir() else path.stem)


def _not_found(path: Path, text: str) -> str:
    if os.path.isdir(path):
        return f"{text} has no config.json; give a model's directory or a preset: {', '.join(preset_names())}"
    if path.suffix == ".json":
        return f"no such file: {text}"
    near = difflib.get_close_matches(text.lower().rsplit("/", 1)[-1], _aliases(), n=1)
    hint = f"did you mean {_aliases()[near[0]]!r}? " if near else ""
    return (
        f"no model {text!r}: neither a config.json, nor a directory with one, nor a preset; {hint}"
        f"presets: {', '.join(preset_names())}"
    )
