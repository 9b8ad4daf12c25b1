"""The pools of a run: a fresh one for each distinct URL, made inside what the user named, filled once, then read cold.

A `file:` target is measured in a scratch directory below the directory of its URL, so that neither the user's pool nor
its capacity is touched and everything goes away with the run. A `block:` target is the raw pool itself, under a
namespace of the run's own, see `raw_pools`. Targets with the same URL share one pool: two emulated
media on one disk need its space once. A `memory:` target lives in one handle, because it has nothing to reopen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from rewarm.bench.cold import Counting, drop_page_cache, try_counting
from rewarm.bench.medium import Medium, medium_of
from rewarm.bench.raw_pools import RawPlace, take_place
from rewarm.bench.scratch import Scratch
from rewarm.bench.throttle import RateLimit
from rewarm.bench.wave import SLOWEST_BYTES_PER_S
from rewarm.errors import ConfigError, StorageError
from rewarm.store.contract import Store
from rewarm.store.opening import open_store, parse_url
from rewarm.tiers.opening import open_tier
from rewarm.units import format_rate, format_size, parse_size
from rewarm.workload.job import Target

NAMESPACE = "rewarm bench"
SPARE_SHARE = 0.25
"""A pool is made this much larger than its payload: logs, and the marks at which a store begins to evict."""
_SPARE_BYTES = 64 << 20
FREE_SHARE = 0.02
"""A store leaves this share of the file system free."""
_UNCOUNTED = Counting(process=False, device=False, reason="memory: is no medium, there is no cold read")


@dataclass
class Pool:
    """One place to store sessions. `medium` is None for memory, `folder` for memory and raw pools."""

    url: str
    folder: Path | None
    medium: Medium | None
    counting: Counting
    store: Store | None
    raw: RawPlace | None = None

    @property
    def device_number(self) -> tuple[int, int] | None:
        """The line of /proc/diskstats, where there is one."""
        return self.medium.device_number if self.medium else None

    @property
    def seen_by_all(self) -> bool:
        """True when other processes can read it."""
        return self.store is None

    def segments(self) -> list[Path]:
        """The files that hold blocks, oldest first; of a raw pool its device."""
        if self.raw:
            return [self.raw.device]
        return sorted(self.folder.glob("writers/*/*.seg")) if self.folder else []

    def ranges(self) -> list[range] | None:
        """The bytes of a raw pool's device that hold blocks of the run."""
        return self.raw.ranges(NAMESPACE) if self.raw else None

    def make_cold(self) -> None:
        """Forget every cached page of the pool's files."""
        if self.raw:
            drop_page_cache([self.raw.device])
        if self.folder:
            drop_page_cache(path for path in self.folder.rglob("*") if path.is_file())

    @contextmanager
    def writer(self) -> Iterator[Store]:
        """A handle to fill the pool with, closed afterwards; memory stays open."""
        if self.store:
            yield self.store
            return
        with open_store(self.raw.writer_url if self.raw else self.url, namespace=NAMESPACE) as store:
            yield store

    @contextmanager
    def reader(self, target: Target) -> Iterator[Store]:
        """A fresh handle that reads at the speed of the medium, or of the emulated one, in the target's order."""
        if self.store:
            yield self.store
            return
        limit = RateLimit(target.emulated_bytes_per_s) if target.emulated_bytes_per_s else None
        with open_reader(self.url, target.order, limit) as store:
            yield store


@contextmanager
def open_reader(url: str, order: str, limit: RateLimit | None) -> Iterator[Store]:
    """A handle on a filled pool that serves requests in an order, no faster than the limit."""
    if order == "shortest":
        url = f"pool:?drive={quote(url, safe='')}&order=shortest"
    with open_tier(url, namespace=NAMESPACE, device_wrapper=limit.wrap if limit else None) as store:
        try:
            yield store
        finally:
            if limit:
                limit.end()


def open_pool(stack: ExitStack, name: str, target: Target, payload_bytes: int, tell: Callable[[str], None]) -> Pool:
    """Make the pool of a target; what it takes is given back when `stack` closes.

    Raises `ConfigError` for a URL that cannot be measured or a capacity below what the job needs, `StorageError` when
    the medium has no room or cannot be written.
    """
    rate = target.emulated_bytes_per_s
    if rate is not None and rate < SLOWEST_BYTES_PER_S:
        raise ConfigError(
            f"target {name!r}: an emulated rate must be at least {format_rate(SLOWEST_BYTES_PER_S)}, where reads would "
            f"time out; got {format_rate(rate)}"
        )
    location = parse_url(target.url)
    if location.scheme == "memory":
        if rate is not None:
            raise ConfigError(f"target {name!r}: memory: has no medium to emulate; give a file: URL")
        store = stack.enter_context(open_store(target.url, namespace=NAMESPACE))
        return Pool(target.url, None, None, _UNCOUNTED, store)
    if location.scheme == "block":
        raw = take_place(stack, name, location, NAMESPACE, needed_bytes(payload_bytes), tell)
        return Pool(raw.url, None, raw.medium, raw.counting, None, raw)
    directory = Path(location.path)
    medium = medium_of(directory)
    options = {"capacity": str(needed_bytes(payload_bytes)), **location.options}
    _check_room(name, parse_size(options["capacity"]), payload_bytes, medium)
    scratch = stack.enter_context(Scratch(directory, tell))
    folder = scratch.path / "pool"
    folder.mkdir()
    url = f"file://{quote(str(folder))}?{urlencode(options)}"
    return Pool(url, folder, medium, try_counting(scratch.path, medium), None)


def needed_bytes(payload_bytes: int) -> int:
    """Capacity that a pool needs to hold so much payload without evicting any."""
    return int(payload_bytes * (1 + SPARE_SHARE)) + _SPARE_BYTES


def _check_room(name: str, capacity: int, payload_bytes: int, medium: Medium) -> None:
    """Refuse before the first byte what would end in evictions or on a full disk."""
    if capacity * 0.9 < payload_bytes:
        raise ConfigError(
            f"target {name!r}: the job stores {format_size(payload_bytes)} and a capacity of {format_size(capacity)} "
            f"would evict some of it; give at least {format_size(needed_bytes(payload_bytes))}, or leave capacity out"
        )
    room = medium.free_bytes - FREE_SHARE * medium.size_bytes
    if room < needed_bytes(payload_bytes) - _SPARE_BYTES // 2:
        raise StorageError(
            f"target {name!r}: the job needs {format_size(needed_bytes(payload_bytes))} and {medium.path} has "
            f"{format_size(max(0, room))} to give; lower tokens, sessions or concurrency"
        )
