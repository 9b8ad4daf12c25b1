"""What stands for an LMCache object in a store: its key, its layout, and the namespace around both. Imports no LMCache.

LMCache's keys name a chunk of tokens, a model, a rank, a group and a salt, and nothing else. What they lack is added:

* the shapes and element types of an object, as the end of its key: a server that keeps KV in fp8 never meets bytes of
  one that keeps it in bf16, although LMCache calls both objects the same;
* the model's weights and configuration, the engine's version and LMCache's release, as the namespace.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rewarm.connectors.common import check_names
from rewarm.errors import ConfigError
from rewarm.geometry.fields import read_config
from rewarm.geometry.fingerprint import commit_of, weights_fingerprint
from rewarm.geometry.namespace import Namespace
from rewarm.units import parse_duration

SCHEMA = "rewarm namespace of lmcache 1"
OPAQUE = bytes(8)
"""The layout of a plain row: what LMCache's serialisers and its own tools hand over, and never describe."""
DEADLINE_S = 10.0
"""A context of ordinary length is recomputed in less: waiting longer for storage cannot pay."""
OPTIONS = ("url", "namespace", "model", "engine", "deadline")


class Options(msgspec.Struct, frozen=True):
    """`adapter_params`, checked."""

    url: str
    namespace: Namespace
    deadline_s: float


def read_options(params: Mapping[str, Any], release: str) -> Options:
    """Options from `adapter_params`, under one release of LMCache. Raises `ConfigError` with what to change."""
    check_names(params, OPTIONS, "RewarmL2Adapter (adapter_params)")
    deadline_s = parse_duration(params["deadline"]) if "deadline" in params else DEADLINE_S
    if deadline_s <= 0:
        raise ConfigError(f"deadline must be above 0, got {params['deadline']!r}")
    return Options(str(params["url"]), server_namespace(params, release), deadline_s)


def server_namespace(params: Mapping[str, Any], release: str) -> Namespace:
    """The namespace of a server: a name that the user answers for, or the weights it serves and the engine's version.

    `model` is a directory with `config.json` and weights, of which samples are read. Raises `ConfigError`.
    """
    name, model, engine = params.get("namespace"), params.get("model"), params.get("engine")
    parts: dict[str, Any] = {"schema": SCHEMA, "lmcache": release, "engine": engine}
    if name and not model:
        parts["name"] = str(name)
    elif model and engine and not name:
        commit = commit_of(model)
        parts["config"], parts["commit"] = read_config(Path(model)), commit
        parts["weights"] = None if commit else weights_fingerprint(model)
    else:
        raise ConfigError(
            "LMCache does not tell which weights and which engine its objects come from: give adapter_params either "
            '"model" (the directory that is served) and "engine" (such as "vllm 0.32"), or "namespace", a name that '
            "you answer for yourself"
        )
    return Namespace(json.dumps(parts, sort_keys=True, separators=(",", ":")))


def layout_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[object]) -> bytes:
    """Eight bytes for the shapes and element types of one object; `OPAQUE` for a single row, of whatever length."""
    if len(shapes) <= 1 and all(len(shape) == 1 for shape in shapes):
        return OPAQUE
    plain = [[str(dtype), *map(int, shape)] for shape, dtype in zip(shapes, dtypes, strict=True)]
    return hashlib.blake2b(json.dumps(plain).encode(), digest_size=len(OPAQUE)).digest()


def name_of(key: Any) -> bytes:
    """24 bytes for an LMCache `ObjectKey`; with a layout after it, the key of a block."""
    model, salt = key.model_name.encode(), key.cache_salt.encode()
    head = f"{key.kv_rank} {key.object_group_id} {len(model)} {len(salt)} ".encode()
    return hashlib.blake2b(head + model + salt + key.chunk_hash, digest_size=24).digest()
