"""Reads the headers of `.safetensors` files: which tensors there are, their shapes, and where their bytes lie.

A file from a stranger costs bounded memory; whatever the format forbids is refused with the file's name: a header that
is too long, is no JSON object or names a tensor twice, sizes that contradict shapes, bytes outside the file, that
overlap or belong to nobody. Values are never interpreted.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec

from rewarm.errors import ConfigError
from rewarm.geometry.fields import parse_json_object

HEADER_BYTES_MAX = 32 << 20
"""A file of 200,000 tensors has a header of about 25 MiB; the format's own limit of 100 MB would cost GBs to parse."""
DIMENSIONS_MAX = 64
NAME_BYTES_MAX = 4096
ELEMENTS_MAX = 1 << 50

_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a file: `start` is the offset of its first byte in the file, `size` its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_header(path: Path) -> tuple[Tensor, ...]:
    """The tensors of a file, sorted by name. Raises `ConfigError` naming the file and what is wrong with it."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing or no regular file")
    try:
        with path.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or not 2 <= length <= min(HEADER_BYTES_MAX, file_bytes - 8):
                raise ConfigError(f"{path} is no safetensors file: its header of {length} bytes cannot be")
            raw = stream.read(length)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    header = parse_json_object(raw, f"the header of {path}")
    header.pop("__metadata__", None)
    data_start = 8 + length
    tensors = [_tensor(name, entry, data_start, path) for name, entry in header.items()]
    _check_layout(tensors, data_start, file_bytes, path)
    return tuple(sorted(tensors, key=lambda tensor: tensor.name))


def _tensor(name: str, entry: Any, data_start: int, path: Path) -> Tensor:
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise ConfigError(f"{path}: the name {name[:64]!r}... is too long")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{path}: tensor {name!r} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ConfigError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _counts(shape) or len(shape) > DIMENSIONS_MAX:
        raise ConfigError(f"{path}: tensor {name!r} has the impossible shape {str(shape)[:200]}")
    if not _counts(offsets) or len(offsets) != 2:
        raise ConfigError(f"{path}: tensor {name!r} has the impossible data_offsets {str(offsets)[:200]}")
    size = offsets[1] - offsets[0]
    bits = math.prod(shape) * _BITS[dtype]
    if bits != size * 8:
        raise ConfigError(f"{path}: tensor {name!r} takes {size} bytes, but {dtype} {shape} needs {bits / 8:.0f}")
    return Tensor(name=name, dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], size=size)


def _counts(value: Any) -> bool:
    """True for a list of whole numbers that are not negative nor absurd."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= ELEMENTS_MAX for item in value
    )


def _check_layout(tensors: list[Tensor], data_start: int, file_bytes: int, path: Path) -> None:
    """The tensors' bytes cover the rest of the file exactly, each byte once."""
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.size)):
        if tensor.start != end:
            raise ConfigError(f"{path}: tensor {tensor.name!r} starts at byte {tensor.start}, expected {end}")
        end += tensor.size
    if end != file_bytes:
        raise ConfigError(f"{path} has {file_bytes} bytes, but its header describes {end}; is it cut off?")
