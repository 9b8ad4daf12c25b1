"""From a URL to a store: parsing, did-you-mean, and the one place that knows every kind of store."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from rewarm.errors import ConfigError, FormatError, StorageError
from rewarm.store.contract import Store, resolve_namespace
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import LADDER, Choice, choose_device
from rewarm.store.file import FileStore
from rewarm.store.hosts import refuse_second_host
from rewarm.store.housekeeping import rebuild_facts
from rewarm.store.memory import MemoryStore
from rewarm.store.patience import Mount
from rewarm.store.pool import POOL_FILE, WRITERS, OtherFormat, Pool, read_facts, replace_facts
from rewarm.store.settings import Settings
from rewarm.units import parse_duration, parse_size

SCHEMES = ("memory", "file", "block")
FILE_OPTIONS = (
    "capacity",
    "access",
    "device",
    "poll",
    "lease",
    "log_keep",
    "io_deadline",
    "close_timeout",
    "save_queue",
    "bounce",
    "io",
)
MEMORY_OPTIONS = ("capacity",)
BLOCK_OPTIONS = (
    "role",
    "host",
    "device",
    "poll",
    "lease",
    "io_deadline",
    "close_timeout",
    "save_queue",
    "bounce",
    "io",
)


class Location(msgspec.Struct, frozen=True):
    """A URL taken apart; `path` is a directory (file), a device (block) or the pool's name (memory)."""

    scheme: str
    path: str
    options: dict[str, str]


def parse_url(url: str | os.PathLike[str]) -> Location:
    """Take a store URL apart. A plain path is a `file:` URL. Raises `ConfigError` with what is allowed."""
    text = os.fspath(url)
    if not text:
        raise ConfigError("the URL of the store is empty; for example file:///mnt/nvme0/kv?capacity=2TiB")
    if "\0" in unquote(text):
        raise ConfigError(f"{text!r} has a zero byte, which no path can have")
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        path, _, query = text.partition("?")
        return Location("file", _absolute(path), _options(query, text, FILE_OPTIONS))
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ConfigError(f"cannot read {text!r} as a URL: {error}") from None
    if parts.scheme not in SCHEMES:
        near = difflib.get_close_matches(parts.scheme, SCHEMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; one of {', '.join(SCHEMES)}"
        raise ConfigError(f"unknown scheme {parts.scheme!r} in {text!r}{hint}")
    if parts.fragment:
        raise ConfigError(f"{text!r} has a fragment; write '#' in a path as %23")
    if parts.scheme == "memory":
        return Location("memory", unquote(parts.path), _options(parts.query, text, MEMORY_OPTIONS))
    if parts.netloc or not parts.path.startswith("/"):
        what, example = ("device", "block:///dev/..") if parts.scheme == "block" else ("directory", "file:///dir")
        raise ConfigError(f"{text!r} names no absolute {what}; write {example}, with three slashes")
    allowed = BLOCK_OPTIONS if parts.scheme == "block" else FILE_OPTIONS
    return Location(parts.scheme, unquote(parts.path), _options(parts.query, text, allowed))


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:  # a user whom nobody knows
        raise ConfigError(f"cannot read the path {path!r}: {error}") from None


def _options(query: str, url: str, allowed: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"cannot read the options of {url!r}: {error}") from None
    for name, value in pairs:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; one of {', '.join(allowed)}"
            raise ConfigError(f"unknown option {name!r} in {url}{hint}")
        if name in found:
            raise ConfigError(f"option {name!r} stands twice in {url}")
        found[name] = value
    return found


def _choice(options: dict[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = options.get(name)
    if value is not None and value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(allowed)}"
        raise ConfigError(f"unknown {name} {value!r}; {hint}")
    return value


def _settings(options: dict[str, str]) -> Settings:
    def seconds(name: str, default: float) -> float:
        value = parse_duration(options[name]) if name in options else default
        if not 0 < value <= 86400:
            raise ConfigError(f"{name}={options[name]} must lie above 0 and at most a day")
        return value

    default = Settings()
    return Settings(
        access=cast(Literal["private", "group"] | None, _choice(options, "access", ("private", "group"))),
        device=_choice(options, "device", ("auto", *LADDER)) or default.device,
        poll_s=seconds("poll", default.poll_s),
        lease_s=seconds("lease", default.lease_s),
        log_keep_s=seconds("log_keep", default.log_keep_s),
        io_deadline_s=seconds("io_deadline", default.io_deadline_s),
        close_timeout_s=seconds("close_timeout", default.close_timeout_s),
        save_queue_bytes=parse_size(options["save_queue"]) if "save_queue" in options else default.save_queue_bytes,
        bounce=cast(Literal["auto", "always"], _choice(options, "bounce", ("auto", "always")) or default.bounce),
        io=cast(Literal["thread", "process"], _choice(options, "io", ("thread", "process")) or default.io),
    )


def open_store(
    url: str | os.PathLike[str],
    *,
    namespace: object = None,
    capacity: int | str | None = None,
    device_wrapper: Callable[[Device], Device] | None = None,
    write_device_wrapper: Callable[[Device], Device] | None = None,
) -> Store:
    """Open a store by its URL: `file:///dir?capacity=2TiB` or `memory:`.

    `namespace` is bytes, str or an object with `digest` and `describe()`; blocks of other namespaces are never seen.
    `capacity` may stand here instead of in the URL. The wrappers go around the devices that read and write: throttles
    and faults. Raises `ConfigError` (URL, options, directory missing, contradictions; `PoolInUse` where two
    hosts may have mounted one file system) and `StorageError` (no permission, no space, the medium fails).
    """
    location = parse_url(url)
    wanted = location.options.get("capacity")
    if wanted is not None and capacity is not None:
        raise ConfigError(f"capacity stands both in {url} and as an argument; give it once")
    given = capacity if wanted is None else wanted
    size = None if given is None else parse_size(given)
    if location.scheme == "memory":
        return MemoryStore(namespace, name=location.path or None, capacity_bytes=size)
    settings = _settings(location.options)
    if location.scheme == "block":
        return _open_block(location, settings, namespace, size, device_wrapper, write_device_wrapper)
    resolve_namespace(namespace)  # Whatever is wrong is said before anything is made.
    root = Path(location.path)
    with contextlib.ExitStack() as undo:
        mount = Mount(settings.io_deadline_s)
        undo.callback(mount.end)
        try:
            pool, choice = mount.call(lambda: _look_at(root, size, settings))
        except OSError as error:
            raise StorageError(f"cannot open {root}: {error.strerror or error}") from error
        store = FileStore(
            pool,
            choice,
            settings,
            namespace,
            mount,
            wrap_reads=device_wrapper,
            wrap_writes=write_device_wrapper or (lambda device: device),
        )
        undo.pop_all()
    return store


def _open_block(
    location: Location,
    settings: Settings,
    namespace: object,
    size: int | None,
    wrap_reads: Callable[[Device], Device] | None,
    wrap_writes: Callable[[Device], Device] | None,
) -> Store:
    from rewarm.store.raw.opening import ROLES, Role, facts_of, open_raw_store

    resolve_namespace(namespace)
    made = facts_of(location.path, settings.io_deadline_s).capacity_bytes
    if size is not None and size != made:
        raise ConfigError(f"{location.path} was formatted with capacity={made}, not {size}; leave capacity out")
    return open_raw_store(
        location.path,
        settings,
        namespace,
        role=cast(Role, _choice(location.options, "role", ROLES) or "auto"),
        host=location.options.get("host", ""),
        wrap_reads=wrap_reads or (lambda device: device),
        wrap_writes=wrap_writes or (lambda device: device),
    )


def _look_at(root: Path, size: int | None, settings: Settings) -> tuple[Pool, Choice]:
    """The pool in a directory, made if there is none, and what reads and writes it best."""
    writable = os.access(root, os.W_OK | os.X_OK)
    if not writable and read_facts(root) is None:
        raise StorageError(f"no permission to write in {root}; the first open makes the pool there")
    pool = Pool.open(root, capacity=size, access=settings.access)
    refuse_second_host(root, pool.facts)
    return pool, choose_device(root, prefer=settings.device, writable=writable, sample=root / POOL_FILE)


def repair_pool_file(url: str | os.PathLike[str]) -> bool:
    """Rebuild a damaged or lost `pool.json` from the logs; False where it needs no repair, or is of no file store.

    Raises `FormatError` for a pool of another version, and when the logs do not say what the pool was.
    """
    location = parse_url(url)
    if location.scheme != "file":
        return False
    root = Path(location.path)
    try:
        if read_facts(root) is not None or not (root / WRITERS).is_dir():
            return False
    except OtherFormat:
        raise
    except FormatError:
        pass
    facts = rebuild_facts(root)
    if facts is None:
        raise FormatError(f"{root / POOL_FILE} cannot be rebuilt: no log in {root / WRITERS} says what the pool was")
    replace_facts(root, facts)
    return True
