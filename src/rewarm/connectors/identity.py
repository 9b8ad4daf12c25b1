"""What tells one model from another, for the namespaces of every connector: its weights, its configuration, or a name.

Weights are told apart by the commit they were downloaded as, by samples of their files, or by samples of their tensors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewarm.errors import ConfigError
from rewarm.geometry.fingerprint import SAMPLE_BYTES, commit_of, weights_fingerprint
from rewarm.geometry.namespace import Namespace

_PATHS_AND_VERSIONS = ("name_or_path", "transformers_version")
"""What a configuration says about where it came from: a copied model is the same model."""


def named_namespace(name: str, parts: Mapping[str, Any]) -> Namespace:
    """The namespace that a user named and answers for; blocks that differ in `parts` stay apart from it all the same.

    Raises `ConfigError` for an empty name.
    """
    if not name.strip():
        raise ConfigError("the namespace is empty; leave it out, or give a name")
    named = {"schema": "rewarm namespace of a name 1", "name": name, **parts}
    return Namespace(json.dumps(named, sort_keys=True, separators=(",", ":")))


def weights_of(directory: str | Path) -> tuple[str | None, str | None]:
    """(commit, fingerprint) of the weights in a directory; one of them is known."""
    commit = commit_of(directory)
    return commit, None if commit else weights_fingerprint(directory)


def plain_config(hf_config: Any) -> dict[str, Any]:
    """A configuration of transformers as plain values, without where it was read from."""
    values = hf_config.to_dict()
    return {
        name: _plain(value)
        for name, value in values.items()
        if not name.startswith("_") and name not in _PATHS_AND_VERSIONS
    }


def _plain(value: Any) -> Any:
    """JSON values as they are; dictionaries with names that are numbers, sets and types as what they print as."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else text_of(value)


def text_of(value: Any) -> str:
    """A value of a configuration as text, element types without their library."""
    return "none" if value is None else str(value).removeprefix("torch.")


def live_fingerprint(model: Any) -> str:
    """SHA-256, 64 hex digits, over name, dtype, shape and samples of every parameter and buffer of a loaded model.

    Samples as in `geometry.weights_fingerprint`: 4 KiB from the start, the middle and the end. Raises `ConfigError`
    for tensors that are not on this machine, or only a part of them.
    """
    torch: Any = importlib.import_module("torch")
    whole = hashlib.sha256(b"rewarm live weights 1\0")
    for name, tensor in sorted(_tensors(model).items()):
        if tensor.device.type == "meta" or hasattr(tensor, "device_mesh"):
            raise ConfigError(f"{name} is not in memory as a whole (offloaded, or split over ranks); give a namespace")
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        whole.update(len(head).to_bytes(8, "little") + head)
        flat = tensor.detach().reshape(-1)
        count = max(1, SAMPLE_BYTES // tensor.element_size())
        starts = (0, (len(flat) - count) // 2, len(flat) - count) if len(flat) > 3 * count else (0,)
        for start in starts:
            sample = flat[start : start + count] if len(starts) > 1 else flat
            whole.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def _tensors(model: Any) -> dict[str, Any]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
