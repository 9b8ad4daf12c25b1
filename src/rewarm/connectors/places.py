"""Tries the media that a store's URL names, for the checks of every connector: a directory, drives, a stack.

Reads and writes a nameless file in each directory; makes no pool.
"""

from __future__ import annotations

import os
from pathlib import Path

from rewarm.errors import ConfigError
from rewarm.store.devices.select import choose_device
from rewarm.store.opening import Location, parse_url
from rewarm.store.pool import read_facts
from rewarm.tiers.opening import capacities, media_of, pool_location, stack_settings
from rewarm.units import format_size, parse_size


def check_lasting(url: str) -> None:
    """Raise `ConfigError` for a store that ends with the process."""
    if any(location.scheme == "memory" for _, location in media_of(url)):
        raise ConfigError(
            f"{url!r} ends with the engine's process; give a directory: file:///mnt/nvme0/kv?capacity=2TiB"
        )


def try_directories(url: str) -> str:
    """Every directory is there and can be written and read; what through. Raises `ConfigError` and `StorageError`."""
    return "; ".join(_directory(location) for _, location in media_of(url))


def _directory(location: Location) -> str:
    root = Path(location.path)
    if not root.is_dir():
        raise ConfigError(f"{root} is no directory; make it, or mount the medium there first")
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(f"no permission to write in {root} as user {os.geteuid()}")
    choice = choose_device(root, prefer=location.options.get("device", "auto"))
    return f"{root} on {choice.filesystem}, through {choice.name}"


def try_pools(url: str) -> str:
    """Every directory holds a pool that agrees with the URL, or gets one with a capacity. Raises `ConfigError`."""
    pool = pool_location(url)
    if pool is None:
        return _pool(parse_url(url), None)
    total = pool.options.get("capacity")
    if "dram" in pool.options:
        stack_settings(pool.options, block_tokens=1)  # the engine knows the tokens of a block
    sizes = capacities(pool, None if total is None else parse_size(total))
    media = zip(pool.media(), [*sizes, None], strict=False)
    return "; ".join(f"{name}: {_pool(location, size)}" for (name, location), size in media)


def _pool(location: Location, share: int | None) -> str:
    """One pool on disk; `share` is its part of the capacity of several, where it has none of its own."""
    facts, wanted = read_facts(Path(location.path)), location.options.get("capacity")
    size = share if wanted is None else parse_size(wanted)
    if facts is None:
        if size is None:
            raise ConfigError("no pool there yet, and the URL names no capacity; add ?capacity=2TiB")
        return f"none yet; the first start makes one of {format_size(size)}"
    if size is not None and size != facts.capacity_bytes:
        raise ConfigError(f"the pool has capacity={facts.capacity_bytes}, not {size}; leave capacity out")
    return f"there, capacity {format_size(facts.capacity_bytes)}"
