"""From a URL to a store or a pool of stores: `pool:?drive=/mnt/a&drive=/mnt/b&capacity=8TiB`; the rest is `store`'s.
With `dram=64GiB`, and `shared=/mnt/array/kv`, the pool is a stack.

A configuration file is read as the URL that it stands for. A drive is a directory or a store's URL with options of its
own (`drive=/mnt/a?capacity=1TiB`). Options of the pool that belong to stores (`device`, `poll`, ...) go to every drive;
`capacity` is the sum over all drives.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote

import msgspec

from rewarm.errors import ConfigError
from rewarm.store.contract import SAVE_QUEUE_BYTES, Store
from rewarm.store.devices.base import Device
from rewarm.store.opening import BLOCK_OPTIONS, Location, open_store, parse_url
from rewarm.store.pool import read_facts
from rewarm.store.raw.opening import facts_of
from rewarm.tiers.admission import parse_admission
from rewarm.tiers.order import AGEING
from rewarm.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from rewarm.tiers.pool import PoolSettings, PoolStore
    from rewarm.tiers.stack import StackSettings

ORDERS = ("shortest", "arrival")
DRIVE_OPTIONS = ("access", "device", "poll", "io_deadline", "close_timeout", "save_queue", "bounce", "io")
"""Options that every drive gets as they are."""

STACK_OPTIONS = ("shared", "write_behind", "admission", "block_tokens")
"""Options that have a meaning only with `dram`."""

POOL_OPTIONS = ("drive", "capacity", "order", "ageing", "dram", *STACK_OPTIONS, *DRIVE_OPTIONS)
SCHEME = "pool:"
CONFIG_SUFFIX = ".toml"


class PoolLocation(msgspec.Struct, frozen=True):
    """A pool's URL taken apart; `drives` are (name, location) in the order given, `shared` is the same."""

    drives: list[tuple[str, Location]]
    options: dict[str, str]
    shared: tuple[str, Location] | None = None

    def media(self) -> list[tuple[str, Location]]:
        """Everything on disk: drives, and the shared store."""
        return [*self.drives, *([self.shared] if self.shared else [])]


def is_config(url: str | os.PathLike[str]) -> bool:
    """True for the path of a configuration file; a directory is none, whatever its name."""
    return os.fspath(url).endswith(CONFIG_SUFFIX) and "?" not in os.fspath(url) and not os.path.isdir(url)


def is_pool(url: str | os.PathLike[str]) -> bool:
    """True for a URL that names a pool of drives."""
    return os.fspath(url).startswith(SCHEME)


def media_of(url: str | os.PathLike[str]) -> list[tuple[str, Location]]:
    """Every medium that a URL or a configuration file names, (name, location). Raises `ConfigError`."""
    location = pool_location(url)
    if location is not None:
        return location.media()
    alone = parse_url(url)
    return [(alone.path if alone.scheme == "file" else f"{alone.scheme}:{alone.path}", alone)]


def pool_location(url: str | os.PathLike[str]) -> PoolLocation | None:
    """What a URL or a configuration file says of a pool or stack; None where it names one store."""
    if is_config(url):
        from rewarm.tiers.config import read_config

        url = read_config(url).url()
    return parse_pool_url(os.fspath(url)) if is_pool(url) else None


def open_tier(
    url: str | os.PathLike[str],
    *,
    namespace: object = None,
    capacity: int | str | None = None,
    block_tokens: int | None = None,
    device_wrapper: Callable[[Device], Device] | None = None,
    write_device_wrapper: Callable[[Device], Device] | None = None,
) -> Store:
    """Open what a URL names: a store (see `open_store`, which the arguments go to), a pool of drives, or a stack.

    The path of a configuration file (`kv.toml`) stands for the pool that it describes. `block_tokens` is how many
    tokens a block holds, where the caller knows: for `admission=min-tokens=N`.
    Raises `ConfigError` (URL, options, directory missing, contradictions) and `StorageError` (no permission, no space,
    a medium fails). A pool opens with all of its drives or not at all.
    """
    wrappers = {"device_wrapper": device_wrapper, "write_device_wrapper": write_device_wrapper}
    location = pool_location(url)
    if location is None:
        return open_store(url, namespace=namespace, capacity=capacity, **wrappers)
    return open_pool(
        location,
        namespace,
        capacity,
        lambda drive, size: open_store(drive, namespace=namespace, capacity=size, **wrappers),
        block_tokens,
    )


def parse_pool_url(url: str) -> PoolLocation:
    """Take a pool's URL apart. Raises `ConfigError` with what is allowed."""
    head, _, query = url[len(SCHEME) :].partition("?")
    if head.strip("/"):
        raise ConfigError(f"{url!r} names {head!r} before its options; drives are options: pool:?drive={head}&drive=..")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"cannot read the options of {url!r}: {error}") from None
    drives: list[tuple[str, Location]] = []
    options: dict[str, str] = {}
    for name, value in pairs:
        if name not in POOL_OPTIONS:
            near = difflib.get_close_matches(name, POOL_OPTIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; one of {', '.join(POOL_OPTIONS)}"
            raise ConfigError(f"unknown option {name!r} in {url}{hint}")
        if name == "drive":
            drives.append(_drive(value, url))
        elif name in options:
            raise ConfigError(f"option {name!r} stands twice in {url}")
        else:
            options[name] = value
    shared = _drive(options["shared"], url) if "shared" in options else None
    names = [name for name, _ in [*drives, *([shared] if shared else [])]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"drive {twice} stands twice in {url}")
    if not drives:
        raise ConfigError(f"{url!r} names no drive; write pool:?drive=/mnt/a&drive=/mnt/b&capacity=8TiB")
    alone = [name for name in STACK_OPTIONS if name in options and "dram" not in options]
    if alone:
        raise ConfigError(f"option {alone[0]!r} in {url} needs dram: what is not on its way to a drive waits there")
    return PoolLocation(drives, options, shared)


def _drive(value: str, url: str) -> tuple[str, Location]:
    if value.startswith(SCHEME):
        raise ConfigError(f"a drive of {url!r} is itself a pool; name its drives instead")
    return media_of(value)[0]


def open_pool(
    location: PoolLocation,
    namespace: object,
    capacity: int | str | None,
    open_drive: Callable[[str, int | None], Store],
    block_tokens: int | None = None,
) -> PoolStore:
    """Open every drive with its share of the capacity, the shared store if there is one, and what stands over them."""
    from rewarm.tiers.pool import CLOSE_TIMEOUT_S, PoolSettings

    options = location.options
    if "capacity" in options and capacity is not None:
        raise ConfigError("capacity stands both in the URL of the pool and as an argument; give it once")
    given = options.get("capacity", capacity)
    sizes = capacities(location, None if given is None else parse_size(given))
    settings = PoolSettings(
        ageing=_ageing(options),
        save_queue_bytes=parse_size(options["save_queue"]) if "save_queue" in options else SAVE_QUEUE_BYTES,
        close_timeout_s=parse_duration(options["close_timeout"]) if "close_timeout" in options else CLOSE_TIMEOUT_S,
    )
    stack = stack_settings(options, block_tokens) if "dram" in options else None
    passed_on = {name: value for name, value in options.items() if name in DRIVE_OPTIONS}
    with contextlib.ExitStack() as opened:
        stores = []
        for (name, drive), size in zip(location.media(), [*sizes, None], strict=False):
            store = open_drive(url_of(drive, passed_on), size)
            opened.callback(store.close)
            stores.append((name, store))
        count = len(location.drives)
        pool = _composed(stores[:count], stores[count:], settings, stack)
        opened.pop_all()
    return pool


def _composed(
    drives: list[tuple[str, Store]],
    shared: list[tuple[str, Store]],
    settings: PoolSettings,
    stack: StackSettings | None,
) -> PoolStore:
    from rewarm.tiers.pool import PoolStore
    from rewarm.tiers.stack import StackStore

    if stack is None:
        return PoolStore(drives, settings)
    return StackStore(drives, stack, settings, shared[0] if shared else None)


def stack_settings(options: dict[str, str], block_tokens: int | None) -> StackSettings:
    """What the options of a URL with `dram` say. Raises `ConfigError`, also for what does not fit."""
    from rewarm.tiers.stack import StackSettings

    given = options.get("block_tokens")
    if given is not None and not (given.isdecimal() and int(given) > 0):
        raise ConfigError(f"block_tokens={given} must be a number of tokens above 0")
    behind = options.get("write_behind")
    settings = StackSettings(
        dram_bytes=parse_size(options["dram"]),
        admission=parse_admission(options.get("admission", "all"), int(given) if given else block_tokens),
        write_behind_bytes=None if behind is None else parse_size(behind),
    )
    settings.behind_bytes()
    return settings


def capacities(location: PoolLocation, total: int | None) -> list[int | None]:
    """Bytes to give to each drive at its opening: None where the drive's URL or its pool on disk says it.

    What `total` leaves over is split evenly over the drives that hold no pool yet. Raises `ConfigError` when the sum
    over all drives would differ from `total`.
    """
    known = [_known_capacity(drive) for _, drive in location.drives]
    fresh = known.count(None)
    if total is None:
        return [None] * len(known)
    left = total - sum(size for size in known if size is not None)
    if (left and not fresh) or (fresh and left <= 0):
        held = ", ".join(
            f"{name} {format_size(size)}" for (name, _), size in zip(location.drives, known, strict=True) if size
        )
        hint = (
            "give more, or give the new drives one of their own" if fresh else "leave capacity out, or give their sum"
        )
        raise ConfigError(
            f"capacity={total} ({format_size(total)}) is that of the whole pool, but its drives have {held}; {hint}"
        )
    sizes: list[int | None] = []
    for size in known:
        sizes.append(None if size is not None else left // fresh)
        if size is None:
            left -= left // fresh
            fresh -= 1
    return sizes


def _known_capacity(drive: Location) -> int | None:
    if "capacity" in drive.options:
        return parse_size(drive.options["capacity"])
    if drive.scheme == "block":
        return facts_of(drive.path).capacity_bytes
    if drive.scheme != "file" or not os.path.isdir(drive.path):
        return None
    facts = read_facts(Path(drive.path))
    return facts.capacity_bytes if facts else None


def _ageing(options: dict[str, str]) -> float:
    order = options.get("order", ORDERS[0])
    if order not in ORDERS:
        raise ConfigError(f"order={order} is not known; one of {', '.join(ORDERS)}")
    if order == "arrival":
        if "ageing" in options:
            raise ConfigError("ageing has no meaning with order=arrival, which overtakes nobody")
        return 0.0
    text = options.get("ageing", str(AGEING))
    try:
        ageing = float(text)
    except ValueError:
        raise ConfigError(f"ageing={text} is no number; how many times its own size a request may wait") from None
    if not 0 < ageing < 1e6:
        raise ConfigError(f"ageing={text} must lie above 0; order=arrival overtakes nobody")
    return ageing


def url_of(drive: Location, passed_on: dict[str, str]) -> str:
    """The URL of a drive, with the pool's options where the drive does not say otherwise."""
    allowed = {} if drive.scheme == "memory" else passed_on
    if drive.scheme == "block":
        allowed = {name: value for name, value in passed_on.items() if name in BLOCK_OPTIONS}
    options = {**allowed, **drive.options}
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items())
    head = f"{drive.scheme}:{'' if drive.scheme == 'memory' else '//'}{quote(drive.path)}"
    return f"{head}?{query}" if query else head
