"""Opens a pool for the verbs that look after one: the pool must be there already, and they never make one."""

from __future__ import annotations

from pathlib import Path

import rewarm
from rewarm.errors import ConfigError
from rewarm.store.contract import Store
from rewarm.store.opening import Location, parse_url
from rewarm.store.pool import POOL_FILE, WRITERS, read_facts


def locate_pool(url: str) -> Location:
    """Take a URL apart that must name a pool on disk. Raises `ConfigError` where there is none."""
    location = parse_url(url)
    if location.scheme != "file":
        raise ConfigError(f"{url!r} is no pool on disk: what it holds ends with the process that opened it")
    root = Path(location.path)
    if read_facts(root) is None and not (root / WRITERS).is_dir():
        raise ConfigError(f"{root} holds no pool: there is no {POOL_FILE}; check the path")
    return location


def open_pool(url: str, *, namespace: object = None) -> Store:
    """Open a pool that is there already. Raises as `rewarm.open`."""
    locate_pool(url)
    return rewarm.open(url, namespace=namespace)
