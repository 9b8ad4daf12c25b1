"""A pool described in a TOML file instead of a URL: the same options, under the same names, with units.

`KEYS` is the whole list: what a file may say, what `rewarm config` shows, and what `docs/reference/config.md` is made
from (`python -c "from rewarm.tiers.config import reference_page; print(reference_page(), end='')"`). A file is turned
into a URL, so nothing can be said in one form that means something else in the other. It opens no store.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from rewarm.errors import ConfigError
from rewarm.tiers.admission import parse_admission
from rewarm.tiers.opening import STACK_OPTIONS
from rewarm.tiers.order import AGEING
from rewarm.units import parse_duration, parse_size

DURATION_S_MAX = 86_400.0


class Key(msgspec.Struct, frozen=True):
    """A key of the file: its default as text, what may stand there, and what it means."""

    name: str
    default: str
    allowed: str
    meaning: str
    check: Callable[[str], object]


class Shown(msgspec.Struct, frozen=True):
    """The value of a key, and whether the file says it."""

    key: str
    value: str
    source: str
    meaning: str


def _one_of(*words: str) -> Callable[[str], object]:
    def check(value: str) -> None:
        if value not in words:
            near = difflib.get_close_matches(value, words, n=1)
            raise ConfigError(
                f"{value!r} is not known; " + (f"did you mean {near[0]!r}?" if near else f"one of {words}")
            )

    return check


def _duration(value: str) -> None:
    if not 0 < parse_duration(value) <= DURATION_S_MAX:
        raise ConfigError(f"{value!r} must lie above 0 and at most a day")


def _size(value: str) -> None:
    if parse_size(value) <= 0:
        raise ConfigError(f"{value!r} must be above 0 bytes")


def _ageing(value: str) -> None:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e6:
        raise ConfigError(f"{value!r} must be a number above 0; order = 'arrival' overtakes nobody")


def _tokens(value: str) -> None:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{value!r} must be a number of tokens above 0")


def _admission(value: str) -> None:
    parse_admission(value, block_tokens=1)


def _text_given(value: str) -> None:
    if not value:
        raise ConfigError("is empty; leave it out instead")


DRIVES = Key(
    "drives", "", "a list of directories or store URLs", "the drives of the pool, in any order", lambda value: None
)
KEYS = (
    DRIVES,
    Key("capacity", "as it is on the drives", "a size", "of the whole pool; the first opening needs it", _size),
    Key("dram", "none", "a size", "memory over the drives, for what was read or saved lately", _size),
    Key("shared", "none", "a directory or store URL", "a store below the drives that other hosts use too", _text_given),
    Key("write_behind", "1GiB, at most half of dram", "a size", "copies that wait for a tier; above it none are made",
        _size),
    Key("admission", "all", "all, second-sight, min-tokens=N", "what goes to flash; the rest only to dram",
        _admission),
    Key("block_tokens", "the engine's", "a number", "tokens of a block, for min-tokens", _tokens),
    Key("order", "shortest", "shortest, arrival", "which restore is served next", _one_of("shortest", "arrival")),
    Key("ageing", f"{AGEING:g}", "a number", "times its own bytes that a restore may be overtaken by", _ageing),
    Key("save_queue", "1GiB", "a size", "saves that wait in memory above this are refused", _size),
    Key("poll", "1s", "a duration", "between two looks at what other processes have published", _duration),
    Key("io_deadline", "30s", "a duration", "after which a drive that answers nothing has timed out", _duration),
    Key("close_timeout", "30s", "a duration", "what closing allows queued saves", _duration),
    Key("device", "auto", "auto, uring, aio, threads", "how a drive is read and written",
        _one_of("auto", "uring", "aio", "threads")),
    Key("access", "private", "private, group", "who may read a pool that is made", _one_of("private", "group")),
    Key("bounce", "auto", "auto, always", "always: the caller's memory never meets a drive", _one_of("auto", "always")),
    Key("io", "thread", "thread, process", "process: one per drive reads into shared arenas, beside a busy engine",
        _one_of("thread", "process")),
)  # fmt: skip


class Config(msgspec.Struct, frozen=True):
    """What a file says: `drives` and the values of other keys as text, all of them checked."""

    file: str
    drives: list[str]
    values: dict[str, str]

    def url(self) -> str:
        """The pool's URL that says the same."""
        pairs = [("drive", drive) for drive in self.drives] + list(self.values.items())
        return "pool:?" + "&".join(f"{name}={quote(value, safe='/:?=')}" for name, value in pairs)

    def shown(self) -> list[Shown]:
        """Every key with its value, in the order of the reference page."""
        rows = []
        for key in KEYS:
            value = ", ".join(self.drives) if key is DRIVES else self.values.get(key.name, key.default)
            source = "file" if key is DRIVES or key.name in self.values else "default"
            rows.append(Shown(key.name, value, source, key.meaning))
        return rows


def read_config(path: str | os.PathLike[str]) -> Config:
    """Read and check a file. Raises `ConfigError` that names the file and the key."""
    try:
        table = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {os.fspath(path)}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} is not TOML: {error}") from error
    return make_config(table, os.fspath(path))


def make_config(table: Mapping[str, Any], where: str) -> Config:
    """A checked configuration from plain values; `where` names their source in errors. Raises `ConfigError`."""
    known = {key.name: key for key in KEYS}
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {name!r}; {hint}")
    drives = table.get("drives")
    if not isinstance(drives, list) or not drives or not all(isinstance(drive, str) and drive for drive in drives):
        raise ConfigError(
            f"{where}: 'drives' must be a list of directories, such as ['/mnt/nvme0/kv', '/mnt/nvme1/kv']"
        )
    values = {name: _text(value, f"{where}: {name!r}") for name, value in table.items() if name != "drives"}
    for name, value in values.items():
        try:
            known[name].check(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {name!r}: {error}") from None
    alone = [name for name in STACK_OPTIONS if name in values and "dram" not in values]
    if alone:
        raise ConfigError(f"{where}: {alone[0]!r} needs dram: what is not on its way to a drive waits there")
    if values.get("order") == "arrival" and "ageing" in values:
        raise ConfigError(f"{where}: 'ageing' has no meaning with order = 'arrival', which overtakes nobody")
    return Config(where, drives, values)


def reference_page() -> str:
    """The page that lists every key, as Markdown."""
    lines = [
        "# Configuration",
        "",
        "A pool is described by a URL, or by a TOML file that `rewarm.open` takes in its place. The keys of the file",
        "are the options of the URL; unknown keys are refused. `rewarm config show FILE` prints what holds, and",
        "`rewarm config check FILE` looks at the drives too. This page is made from `rewarm.tiers.config.KEYS`.",
        "",
        "```toml",
        'drives = ["/mnt/nvme0/kv", "/mnt/nvme1/kv?capacity=3TiB"]',
        'capacity = "5TiB"',
        'dram = "64GiB"  # with it, the pool is a stack',
        'shared = "/mnt/array/kv?capacity=100TiB"',
        "```",
        "",
        "| key | allowed | default | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{key.name}` | {key.allowed} | {key.default or 'required'} | {key.meaning} |" for key in KEYS]
    return "\n".join(lines) + "\n"


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ConfigError(f"{where} is one value, as text or a number, got {value!r}")
    return str(value)
