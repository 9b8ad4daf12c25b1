"""Raw pools (`block:`) as targets of a benchmark: the pool that is formatted there, under a namespace of the run's own.

Everything goes through the store, so nothing outside the pool is ever written, and a pool without room for the job is
refused rather than made to evict what others have saved. What the run saves is erased at its end, and by the next run
where this one was killed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from rewarm.bench.cold import Counting, try_counting_of
from rewarm.bench.medium import Medium, medium_of_device
from rewarm.errors import ConfigError, RewarmError
from rewarm.store.contract import resolve_namespace
from rewarm.store.opening import Location, open_store
from rewarm.store.raw.inspection import inspect_raw, places_of
from rewarm.units import format_size


@dataclass(frozen=True)
class RawPlace:
    """A raw pool with room for a job. `writer_url` owns it, `url` reads it."""

    url: str
    writer_url: str
    device: Path
    medium: Medium
    counting: Counting

    def ranges(self, namespace: str) -> list[range]:
        """Bytes of the device that hold blocks of a namespace."""
        return places_of(str(self.device), resolve_namespace(namespace)[0])


def take_place(
    stack: ExitStack, name: str, location: Location, namespace: str, need_bytes: int, tell: Callable[[str], None]
) -> RawPlace:
    """Own a raw pool, erase what a killed run has left in it, and see that there is room; erased when `stack` closes.

    Raises `ConfigError` where no pool or no room is, `PoolInUse` where another owner lives, `StorageError`.
    """
    path = location.path
    url, writer_url = (_url(location, role) for role in ("reader", "owner"))
    digest = resolve_namespace(namespace)[0].hex()
    found = inspect_raw(path)
    if found.namespaces.get(digest):
        tell(f"erased {format_size(_erase(writer_url, namespace))} in {path}, left behind by a run that was killed")
        found = inspect_raw(path)
    free_bytes = found.capacity_bytes - found.used_bytes
    if free_bytes < need_bytes:
        raise ConfigError(
            f"target {name!r}: the job needs {format_size(need_bytes)} and the raw pool on {path} has "
            f"{format_size(free_bytes)} free; evict some of it, format another, or lower tokens or concurrency"
        )
    stack.callback(_clean_up, writer_url, namespace, path, tell)
    device = Path(found.path)
    medium = medium_of_device(device, found.capacity_bytes, free_bytes)
    return RawPlace(url, writer_url, device, medium, try_counting_of(device, medium))


def _url(location: Location, role: str) -> str:
    return f"block://{quote(location.path)}?{urlencode({**location.options, 'role': role})}"


def _erase(url: str, namespace: str) -> int:
    with open_store(url, namespace=namespace) as store:
        return store.erase()


def _clean_up(url: str, namespace: str, path: str, tell: Callable[[str], None]) -> None:
    try:
        tell(f"erased {format_size(_erase(url, namespace))} in {path}")
    except RewarmError as error:  # the run has ended, and says why; this is what it leaves
        tell(f"what was saved in {path} could not be erased: {error}; the next run erases it")
