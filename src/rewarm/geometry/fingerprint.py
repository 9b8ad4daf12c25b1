"""Tells one set of weights from another without reading all of them, and finds the commit of a downloaded snapshot.

Names and shapes alone cannot tell a fine-tune from its base, so `weights_fingerprint` also reads samples of every
tensor. It notices any training step that touched a whole matrix; it does not notice an edit of a few rows outside the
samples: name such models by their commit, or give a namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from rewarm.errors import ConfigError
from rewarm.geometry.fields import parse_json_object
from rewarm.geometry.safetensors import Tensor, read_header

SAMPLE_BYTES = 4096
INDEX_FILE = "model.safetensors.index.json"
INDEX_BYTES_MAX = 64 << 20
"""The index of a model with 200,000 tensors takes about 20 MiB."""
FILES_MAX = 4096
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_commit(text: str) -> bool:
    """True for a full git commit, 40 lower-case hex digits: a branch or a tag can move."""
    return _COMMIT.fullmatch(text) is not None


def commit_of(directory: str | Path) -> str | None:
    """The commit of a snapshot in a Hugging Face cache (`.../snapshots/<commit>`), or None."""
    path = Path(os.path.abspath(directory))
    return path.name if path.parent.name == "snapshots" and is_commit(path.name) else None


def weights_fingerprint(directory: str | Path) -> str:
    """SHA-256, 64 hex digits, over name, dtype, shape, size and samples of every tensor of a directory.

    Samples: 4 KiB each from the start, the middle and the end; a tensor of at most 12 KiB is read whole. Tensors count
    in order of name, so the same weights cut into other files have the same fingerprint. Files are those of
    `model.safetensors.index.json`, or else every `*.safetensors`. Raises `ConfigError`: none there, one missing,
    damaged, or the same tensor twice.
    """
    root = Path(directory)
    found: dict[str, tuple[Path, bytes]] = {}
    for file in _weight_files(root):
        for name, digest in _tensor_digests(file):
            if name in found:
                raise ConfigError(f"tensor {name!r} is in {found[name][0]} and in {file}")
            found[name] = (file, digest)
    if not found:
        raise ConfigError(f"the .safetensors files in {root} hold no tensors")
    whole = hashlib.sha256(b"rewarm weights 1\0")
    for name in sorted(found):
        whole.update(found[name][1])
    return whole.hexdigest()


def _tensor_digests(file: Path) -> Iterator[tuple[str, bytes]]:
    """(name, SHA-256 over name, dtype, shape, size and samples) of each tensor of a file."""
    tensors = read_header(file)
    try:
        with file.open("rb", buffering=0) as stream:
            for tensor in tensors:
                head = json.dumps([tensor.name, tensor.dtype, tensor.shape, tensor.size]).encode()
                digest = hashlib.sha256(len(head).to_bytes(8, "little") + head)
                for start, length in _samples(tensor):
                    digest.update(_read(stream.fileno(), start, length, file))
                yield tensor.name, digest.digest()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error


def _samples(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """(offset in the file, bytes) of each sample."""
    if tensor.size <= 3 * SAMPLE_BYTES:
        yield tensor.start, tensor.size
        return
    for offset in (0, (tensor.size - SAMPLE_BYTES) // 2, tensor.size - SAMPLE_BYTES):
        yield tensor.start + offset, SAMPLE_BYTES


def _read(handle: int, start: int, length: int, file: Path) -> bytes:
    data = os.pread(handle, length, start)
    if len(data) != length:
        raise ConfigError(f"{file} ended early while it was read; is it still being written?")
    return data


def _weight_files(root: Path) -> list[Path]:
    try:
        if (root / INDEX_FILE).exists():
            names = _indexed_files(root / INDEX_FILE)
        else:
            names = sorted(path.name for path in root.iterdir() if path.name.endswith(".safetensors"))
    except OSError as error:
        raise ConfigError(f"cannot read {root}: {error.strerror or error}") from error
    if not names:
        raise ConfigError(f"no .safetensors files in {root}; give the model's commit or an explicit namespace")
    if len(names) > FILES_MAX:
        raise ConfigError(f"{root} names {len(names)} weight files; more than {FILES_MAX} cannot be one model")
    return [root / name for name in names]


def _indexed_files(index: Path) -> list[str]:
    if not index.is_file():
        raise ConfigError(f"{index} is no regular file")
    with index.open("rb") as stream:
        raw = stream.read(INDEX_BYTES_MAX + 1)
    if len(raw) > INDEX_BYTES_MAX:
        raise ConfigError(f"{index} is larger than {INDEX_BYTES_MAX} bytes")
    weights = parse_json_object(raw, str(index)).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise ConfigError(f"{index}: weight_map must map names of tensors to names of files")
    names = sorted(set(weights.values()))
    for name in names:
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            raise ConfigError(f"{index}: {name!r} is no file beside it")
    return names
