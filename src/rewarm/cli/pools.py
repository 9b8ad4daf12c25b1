"""Opens a pool for the verbs that look after one: the pool must be there already, and they never make one."""

from __future__ import annotations

from pathlib import Path

import rewarm
from rewarm.errors import ConfigError
from rewarm.store.contract import Store
from rewarm.store.opening import Location
from rewarm.store.pool import POOL_FILE, WRITERS, read_facts
from rewarm.store.raw.opening import facts_of
from rewarm.tiers.opening import media_of, pool_location, url_of
from rewarm.units import format_size, parse_size


def require_pool(url: str) -> None:
    """Raise `ConfigError` unless all that a URL names is on disk and agrees with the capacity it gives."""
    for name, location in media_of(url):
        _require(name, location)


def _require(name: str, location: Location) -> None:
    if location.scheme == "block":
        facts_of(location.path)
        return
    if location.scheme != "file":
        raise ConfigError(f"{name!r} is no pool on disk: what it holds ends with the process that opened it")
    root = Path(location.path)
    facts = read_facts(root)
    if facts is None and not (root / WRITERS).is_dir():
        raise ConfigError(f"{root} holds no pool: there is no {POOL_FILE}; check the path")
    capacity = location.options.get("capacity")
    if facts and capacity is not None and parse_size(capacity) != facts.capacity_bytes:
        made = f"capacity={facts.capacity_bytes} ({format_size(facts.capacity_bytes)})"
        raise ConfigError(f"{root} was made with {made}, not {parse_size(capacity)}; leave capacity out")


def media_urls(url: str) -> list[str]:
    """The URLs of the pools on disk that a URL or a configuration file names; itself where it names one."""
    if pool_location(url) is None:
        return [url]
    return [url_of(location, {}) for _, location in media_of(url)]


def open_pool(url: str, *, namespace: object = None) -> Store:
    """Open a pool that is there already. Raises as `rewarm.open`."""
    require_pool(url)
    return rewarm.open(url, namespace=namespace)
