"""Opens a pool for the verbs that look after one: the pool must be there already, and they never make one."""

from __future__ import annotations

from pathlib import Path

import rewarm
from rewarm.errors import ConfigError
from rewarm.store.contract import Store
from rewarm.store.opening import parse_url
from rewarm.store.pool import POOL_FILE, WRITERS, read_facts
from rewarm.units import format_size, parse_size


def require_pool(url: str) -> None:
    """Raise `ConfigError` unless a URL names a pool on disk and agrees with its capacity."""
    location = parse_url(url)
    if location.scheme != "file":
        raise ConfigError(f"{url!r} is no pool on disk: what it holds ends with the process that opened it")
    root = Path(location.path)
    facts = read_facts(root)
    if facts is None and not (root / WRITERS).is_dir():
        raise ConfigError(f"{root} holds no pool: there is no {POOL_FILE}; check the path")
    capacity = location.options.get("capacity")
    if facts and capacity is not None and parse_size(capacity) != facts.capacity_bytes:
        made = f"capacity={facts.capacity_bytes} ({format_size(facts.capacity_bytes)})"
        raise ConfigError(f"{root} was made with {made}, not {parse_size(capacity)}; leave capacity out")


def open_pool(url: str, *, namespace: object = None) -> Store:
    """Open a pool that is there already. Raises as `rewarm.open`."""
    require_pool(url)
    return rewarm.open(url, namespace=namespace)
