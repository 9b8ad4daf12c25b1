"""Opens a trace: finds out its format from its first bytes and gives the `Trace` behind it.

Formats: Mooncake JSON lines, session files of coding agents (one, or a directory of them), Azure CSV, LMCache lookup
hash files and server logs, and Rewarm's own recordings; each plain or `.gz`. Unknown files are refused.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import msgspec

from rewarm.errors import ConfigError
from rewarm.workload.formats import azure, lmcache, mooncake, recording, sessions_json
from rewarm.workload.formats.source import HEAD_BYTES, Source, open_text
from rewarm.workload.requests import Trace

KNOWN = (
    "Mooncake JSON lines, agent session JSON (a file or a directory), Azure CSV, "
    "LMCache lookup hashes or server log, Rewarm recording"
)
_SUFFIXES = (".json", ".jsonl")
_DIRECTORY = "a directory can hold session files or LMCache lookup-hash files"
WHOLE_BYTES_MAX = 256 << 20
"""A session file is one JSON object and is read whole up to this size; a larger file must be JSON lines."""


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """The trace in a file or directory; reading starts with `batches()`.

    Raises `ConfigError` for a format that is not known, and `OSError` for a path that cannot be read.
    """
    source = _source(Path(path))
    first_line, more = _first_bytes(source.files[0])
    head = _object(source.files[0], first_line) if first_line.startswith("{") else None
    if head is not None and sessions_json.matches(head):
        return sessions_json.open_source(source, head)
    if head is not None and lmcache.matches(head):
        return lmcache.open_source(source, head)
    if source.path.is_dir():
        raise ConfigError(f"{source.path}: {_DIRECTORY}; {source.files[0].name} is neither: give one file")
    if head is not None and recording.matches(head):
        return recording.open_source(source, head)
    if head is not None and mooncake.matches(head):
        return mooncake.open_source(source, head)
    if azure.matches(first_line):
        return azure.open_source(source)
    if lmcache.matches_log(first_line + more):
        return lmcache.open_log(source)
    raise ConfigError(f"{source.files[0]}: not a trace of a known format; known are {KNOWN}")


def _source(path: Path) -> Source:
    if not path.is_dir():
        return Source(path, (path,))
    files = tuple(sorted(f for f in path.iterdir() if f.name.removesuffix(".gz").endswith(_SUFFIXES)))
    if not files:
        raise ConfigError(f"{path}: the directory has no trace files ({', '.join(_SUFFIXES)}, or .gz of these)")
    return Source(path, files)


def _first_bytes(file: Path) -> tuple[str, str]:
    """The first line that is not blank, whole, and some text after it."""
    with open_text(file) as stream:
        try:
            line = ""
            while not line.strip():
                line = stream.readline()
                if not line:
                    raise ConfigError(f"{file}: the file is empty; known are {KNOWN}")
            return line.strip(), stream.read(HEAD_BYTES)
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
            raise ConfigError(f"{file}: cannot be read as text ({error}); known are {KNOWN}") from error


def _object(file: Path, first_line: str) -> dict[str, object] | None:
    """The JSON object on the first line, or the one that the whole file is (a session written over several lines)."""
    for whole in (False, True):
        try:
            head = msgspec.json.decode(_whole(file) if whole else first_line)
        except msgspec.DecodeError:
            continue
        return head if isinstance(head, dict) else None
    return None


def _whole(file: Path) -> str:
    if file.stat().st_size > WHOLE_BYTES_MAX:
        return ""
    with open_text(file) as stream:
        return stream.read()
