"""What makes blocks of two engines interchangeable, as one digest: model, weights, dtype, blocks, ranks, tenant.

A `Namespace` holds every part as canonical JSON and its digest is the SHA-256 of that text, so any changed part is
another namespace. What is not known is refused: serving blocks of another fine-tune would be wrong bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rewarm.errors import ConfigError
from rewarm.geometry.dtypes import DType, parse_dtype
from rewarm.geometry.fields import read_config
from rewarm.geometry.fingerprint import commit_of, is_commit, weights_fingerprint
from rewarm.geometry.parallel import BLOCK_TOKENS_MAX, RANKS_MAX

SCHEMA = "rewarm namespace of a model 1"
TEXT_BYTES_MAX = 16 << 20
"""Bound of the canonical text, well above the largest configuration taken."""
INTEGER_MAX = 1 << 128
"""No configuration has a larger number; Python will not print one of thousands of digits."""
DEPTH_MAX = 64
_INSTEAD = "give it, or give an explicit namespace (a name of your own) and answer for what shares it"


class Namespace(msgspec.Struct, frozen=True):
    """A namespace that `rewarm.open(namespace=...)` accepts. `text` is canonical JSON: sorted names, no blanks."""

    text: str

    @property
    def digest(self) -> bytes:
        """SHA-256 of the text, 32 bytes."""
        return hashlib.sha256(self.text.encode()).digest()

    def describe(self) -> str:
        """The parts as JSON for people; equal descriptions have equal digests."""
        return json.dumps(json.loads(self.text), sort_keys=True, indent=1)


def model_namespace(
    *,
    config: Mapping[str, Any],
    commit: str | None = None,
    fingerprint: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    kv_dtype: DType | str | None,
    block_tokens: int | None,
    layout: str | None,
    tp: int | None,
    pp: int | None,
    rank_split: bool | None,
    tenant_salt: str | bytes = b"",
) -> Namespace:
    """The namespace of one model on one kind of engine. Every part is needed; None is refused by its name.

    * `config`: the whole `config.json`; `overrides`: what the engine was told beside it (RoPE scaling, quantisation)
    * `commit` (40 hex digits) or `fingerprint` (of `weights_fingerprint`), or both
    * `kv_dtype`: resolved, not "auto"; `block_tokens`; `layout`: the engine's name for the order inside a block
    * `tp`, `pp`, and whether each rank stores its own part (`rank_split`) or whole blocks are stored once
    * `tenant_salt`: keeps tenants apart; only its SHA-256 is kept

    Raises `ConfigError` naming the part.
    """
    if commit is None and fingerprint is None:
        raise _missing("the model's commit or the fingerprint of its weights")
    if kv_dtype is None or kv_dtype == "auto":
        raise _missing("kv_dtype, as resolved by the engine")
    if not isinstance(config, Mapping) or not config:
        raise _missing("the model's configuration")
    parts = {
        "schema": SCHEMA,
        "commit": _checked_hex(commit, "commit", 40),
        "weights_sha256": _checked_hex(fingerprint, "fingerprint", 64),
        "config": dict(config),
        "overrides": dict(overrides or {}),
        "kv_dtype": parse_dtype(kv_dtype).value,
        "block_tokens": _count(block_tokens, "block_tokens", BLOCK_TOKENS_MAX),
        "layout": _layout(layout),
        "tp": _count(tp, "tp", RANKS_MAX),
        "pp": _count(pp, "pp", RANKS_MAX),
        "rank_split": _flag(rank_split, "rank_split"),
        "tenant_salt_sha256": _salt(tenant_salt),
    }
    return Namespace(_canonical(parts))


def directory_namespace(
    directory: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    kv_dtype: DType | str | None,
    block_tokens: int | None,
    layout: str | None,
    tp: int | None,
    pp: int | None,
    rank_split: bool | None,
    tenant_salt: str | bytes = b"",
) -> Namespace:
    """The namespace of a model on disk: its `config.json`, and the commit of the snapshot or else its weights.

    Reads 12 KiB of every tensor where the directory is not a snapshot of a Hugging Face cache.
    """
    commit = commit_of(directory)
    return model_namespace(
        config=read_config(Path(directory)),
        commit=commit,
        fingerprint=None if commit else weights_fingerprint(directory),
        overrides=overrides,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        layout=layout,
        tp=tp,
        pp=pp,
        rank_split=rank_split,
        tenant_salt=tenant_salt,
    )


def _canonical(parts: Mapping[str, Any]) -> str:
    _check_json(parts, "config or overrides", 0)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigError(f"the configuration takes {len(text)} bytes as JSON, more than {TEXT_BYTES_MAX}")
    return text


def _check_json(value: Any, where: str, depth: int) -> None:
    """Refuses what JSON would change on the way (names that are no strings, NaN, objects): no two parts may meet."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"{where} is nested too deep")
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{where} has the name {name!r}, which is no string")
            _check_json(item, where if depth == 0 and name == "config" else f"{where}: {name}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_json(item, where, depth + 1)
    elif isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"{where} is {value}, which cannot be compared; {_INSTEAD}")
    elif isinstance(value, int):
        if abs(value) > INTEGER_MAX:
            raise ConfigError(f"{where} is a whole number beyond 2^128")
    elif not (value is None or isinstance(value, str)):
        raise ConfigError(f"{where} holds a {type(value).__name__}, whose meaning is not known; {_INSTEAD}")


def _missing(part: str) -> ConfigError:
    return ConfigError(f"a namespace needs {part}; {_INSTEAD}")


def _checked_hex(value: str | None, name: str, digits: int) -> str | None:
    if value is None:
        return None
    if name == "commit" and not is_commit(value):
        raise ConfigError(f"commit must be 40 hex digits, got {value!r}: a branch or tag can move; {_INSTEAD}")
    if len(value) != digits or not set(value) <= set("0123456789abcdef"):
        raise ConfigError(f"{name} must be {digits} lower-case hex digits, got {value!r}")
    return value


def _count(value: int | None, name: str, most: int) -> int:
    if value is None:
        raise _missing(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} must be a whole number from 1 to {most}, got {value!r}")
    return value


def _flag(value: bool | None, name: str) -> bool:
    if value is None:
        raise _missing(name)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return value


def _layout(value: str | None) -> str:
    if value is None or not value.strip():
        raise _missing("layout, the order of keys and values inside a block")
    return value


def _salt(value: str | bytes) -> str:
    raw = value.encode() if isinstance(value, str) else bytes(value)
    return hashlib.sha256(b"rewarm tenant salt\0" + raw).hexdigest()
