"""The lines of a trace file, plain or gzip, with their place for error messages; and strict decoding of one line."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from rewarm.errors import ConfigError

HEAD_BYTES = 1 << 16
"""Bytes read to detect a format: more than the first lines of any of them, except one prompt of millions of blocks."""

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """One file, or the files of a directory in order of name."""

    path: Path
    files: tuple[Path, ...]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Every line that is not blank, as (where, text)."""
        for file in self.files:
            with open_text(file) as stream:
                try:
                    for number, line in enumerate(stream, start=1):
                        if line.strip():
                            yield f"{file}:{number}", line
                except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
                    raise ConfigError(f"{file}: cannot be read as text ({error})") from error


def open_text(file: Path) -> io.TextIOBase:
    """Open a file for reading as UTF-8, through gzip when its name ends in `.gz`."""
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def decode(where: str, line: str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode one JSON line. Raises `ConfigError` with the place and the field that is wrong."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {error}") from error


def block_id(name: str) -> int:
    """64 bits that stand for a block's written name, equal in every process."""
    return xxhash.xxh3_64_intdigest(name.encode())
