"""`RewarmHiCache`: a storage backend of SGLang's hierarchical cache, over any store that `rewarm.open` opens.

SGLang calls it from its prefetch and backup threads and waits for the answer, so every call is synchronous; its pages
belong to SGLang again when a call returns. Therefore a call ends only when the kernel has let go of them: a deadline
decides what is a hit, never when memory is handed back. A configuration error stops the start; afterwards nothing
raises: what the storage cannot do is False, counted by cause and logged.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rewarm.connectors.failures import Failures
from rewarm.connectors.options import check_names, deadline_of
from rewarm.connectors.sglang.identity import namespace_of
from rewarm.connectors.sglang.pages import HostPool
from rewarm.errors import ConfigError, RewarmError
from rewarm.store.buffers import address_of
from rewarm.store.contract import Stats, Store, Transfer
from rewarm.tiers.opening import open_tier
from rewarm.units import format_size

log = logging.getLogger("sglang.rewarm")
"""Below SGLang's own logger, so that its handlers and levels apply."""

OPTIONS = ("url", "namespace", "model", "deadline")
"""Keys of the configuration beside SGLang's own."""
_ENGINES_OPTIONS = ("backend_name", "module_path", "class_name", "interface_v1")
SAVE_DEADLINE_S = 60.0
HELD_LOG_S = 10.0
"""How often a medium is complained about that does not let go of memory."""
SAMPLES_MAX = 1000
"""Figures kept between two reports to SGLang's metrics."""

_storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
_HiCacheStorage: Any = _storage.HiCacheStorage
_KV = str(_storage.PoolName.KV)
_MAMBA = str(_storage.PoolName.MAMBA)


class BackendStats(msgspec.Struct, frozen=True):
    """Counters since the start, in pages; `failed` by verb and cause, in blocks of the store."""

    restored_pages: int
    kept_pages: int
    failed: dict[str, int]
    store: Stats


class RewarmHiCache(_HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """A dynamic HiCache backend; see the module."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Check the configuration. The store is opened when the host pool is known. Raises `ConfigError`."""
        self._config = storage_config
        self._options = dict(storage_config.extra_config or {})
        check_options(self._options)
        self._deadline_s = deadline_of(self._options)
        self._store: Store | None = None
        self._pools: dict[str, HostPool] = {}
        self._registered: set[int] = set()
        self._pages: Counter[str] = Counter()
        self._failures = Failures(log)
        self._samples: deque[tuple[str, int, float]] = deque(maxlen=SAMPLES_MAX)

    # SGLang introduces its memory.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for this pool and register its memory, once. Raises `ConfigError` and `StorageError`."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(mem_pool_host, _KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """As above, for the further pools of hybrid models."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(host_pool, str(host_pool_name))

    # Keys and values of the main pool.

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages are held from the first on, without a gap. Reads memory only."""
        return self._leading(_KV, keys)

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool; True for each that came back whole."""
        return self._move("load", _KV, keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write pages of the host pool; True for each that is stored, or was."""
        return self._move("save", _KV, keys, host_indices)

    # The same for models with several pools.

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The prefixes that every pool can restore, by each pool's policy, as SGLang's `PoolTransferResult`."""
        policies = _storage.PoolHitPolicy
        found = self._leading(_KV, keys)
        hits: dict[Any, int] = {_KV: found} if found else {}
        restorable = set(range(1, found + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            held = self._held(str(transfer.name), keys)
            if transfer.hit_policy == policies.ALL_PAGES:
                able = set(range(1, min(found, held.index(False) if False in held else len(held)) + 1))
            elif transfer.hit_policy == policies.TRAILING_PAGES:
                last = max(1, len(transfer.keys or ()))
                able = {end for end in range(1, found + 1) if all(held[max(0, end - last) : end])}
            else:
                continue  # such a pool gates nothing; without a verdict of ours it is computed
            if able:
                hits[transfer.name] = max(able)
            restorable &= able
        return _storage.PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_get_v1` for each pool."""
        return {t.name: self._move("load", str(t.name), t.keys or (), t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """`batch_set_v1` for each pool."""
        return {t.name: self._move("save", str(t.name), t.keys or (), t.host_indices) for t in transfers}

    # The interface that copies: SGLang does not use it with interface_v1, which `check_options` asks for.

    def exists(self, key: str) -> bool:
        """Whether a page is held."""
        return self._leading(_KV, [key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: pages are moved in place only."""

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing for every key."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """False: pages are moved in place only."""
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """False, as `set`."""
        return False

    # Looking after it.

    def clear(self) -> bool:
        """Remove every page of this namespace, whoever wrote it; False when the storage refuses."""
        try:
            return self._store is not None and self._store.erase() >= 0
        except (RewarmError, OSError) as error:
            log.error("rewarm: pages were not removed: %s", error)
            return False

    def get_stats(self) -> Any:
        """What SGLang's own metrics take: pages and GB/s of each call since the last report."""
        found = importlib.import_module("sglang.srt.observability.metrics_collector").StorageMetrics()
        while self._samples:
            verb, pages, rate = self._samples.popleft()
            (found.prefetch_pgs if verb == "load" else found.backup_pgs).append(pages)
            (found.prefetch_bandwidth if verb == "load" else found.backup_bandwidth).append(rate)
        return found

    def stats(self) -> BackendStats | None:
        """Counters since the start; None before the host pool is known."""
        if self._store is None:
            return None
        return BackendStats(self._pages["load"], self._pages["save"], dict(self._failures.counts), self._store.stats())

    def close(self) -> None:
        """Finish what is queued within a bounded time and give the store back. Idempotent."""
        if self._store is not None:
            self._store.close()

    # How it is done.

    def _add(self, host_pool: Any, name: str) -> None:
        known = self._pools.get(name)
        if known is not None:
            if known.pool is host_pool:
                return
            raise ConfigError(f"another host pool {name!r} was registered already; attach the backend anew")
        config = self._config
        # Latent KV is the same on all ranks and written by one; everything else belongs to its rank.
        shared = config.is_mla_model and name != _MAMBA
        rank = [None if shared else config.tp_rank, config.pp_rank, config.attn_cp_rank, getattr(config, "dcp_rank", 0)]
        pool = HostPool(host_pool, name, rank)
        if self._store is None:
            self._store = self._open(pool)
        for arena in pool.arenas:
            if address_of(arena) not in self._registered:  # pools of hybrid models may share their memory
                self._registered.add(address_of(arena))
                self._store.register(arena)
        self._pools[name] = pool
        size = format_size(pool.page_bytes)
        log.info("rewarm: host pool %s, pages of %d tokens and %s", name, pool.page_tokens, size)

    def _open(self, pool: HostPool) -> Store:
        shape = {part: value for part, value in pool.shape.items() if part != "rank"}
        namespace = namespace_of(self._options, self._config, shape)
        piece_tokens = max(1, pool.page_tokens // len(pool.piece_bytes))
        store = open_tier(self._options["url"], namespace=namespace, block_tokens=piece_tokens)
        stats = store.stats()
        digest = namespace.digest.hex()[:12]
        log.info(
            "rewarm: %s, device %s, namespace %s, %d blocks", self._options["url"], stats.device, digest, stats.blocks
        )
        for refusal in stats.device_refusals:
            log.info("rewarm: a faster device was not used: %s", refusal)
        return store

    def _held(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Which pages a pool could restore."""
        pool = self._pools.get(name)
        if pool is None or self._store is None or not keys:
            return [False] * len(keys)
        try:
            return pool.whole(self._store.lookup(pool.keys(keys)).mask, len(keys))
        except RewarmError as error:
            self._failures.note({f"lookup {type(error).__name__}": len(keys)})
            return [False] * len(keys)

    def _leading(self, name: str, keys: Sequence[str]) -> int:
        held = self._held(name, keys)
        return held.index(False) if False in held else len(held)

    def _move(self, verb: str, name: str, keys: Sequence[str], indices: Any) -> list[bool]:
        """Load or save pages and wait until their memory is SGLang's again."""
        pool, start_s = self._pools.get(name), time.monotonic()
        if pool is None or self._store is None or not keys:
            return [False] * len(keys)
        try:
            buffers = pool.buffers(indices, len(keys))
            submit = self._store.load if verb == "load" else self._store.save
            transfer = submit(pool.keys(keys), buffers)
        except (RewarmError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
            # What SGLang handed over is no page of the pool, or the store is closed: a defect, not the medium.
            log.error("rewarm: %s of %d pages of %s refused: %s", verb, len(keys), name, error)
            self._failures.note({f"{verb} {type(error).__name__}": len(keys)})
            return [False] * len(keys)
        good = transfer.wait(self._deadline_s if verb == "load" else SAVE_DEADLINE_S)
        # Not bounded by us: giving memory back that the kernel still writes to would be wrong bytes. SGLang's scheduler
        # does not wait for this thread; the kernel's own time-out ends it.
        while not transfer.wait_released(HELD_LOG_S):
            log.error("rewarm: the storage has not let go of %d pages of %s for %.0f s", len(keys), name, HELD_LOG_S)
        pages = pool.whole(good, len(keys))
        self._count(verb, transfer, sum(pages), pool, time.monotonic() - start_s)
        return pages

    def _count(self, verb: str, transfer: Transfer, pages: int, pool: HostPool, took_s: float) -> None:
        self._pages[verb] += pages
        if self._config.enable_storage_metrics:
            self._samples.append((verb, pages, pages * pool.page_bytes / max(took_s, 1e-9) / 1e9))
        self._failures.of(verb, transfer)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unknown or missing key of the backend's configuration."""
    check_names(options, OPTIONS, "the backend RewarmHiCache", also=_ENGINES_OPTIONS)
    if not options.get("interface_v1"):
        raise ConfigError('the backend RewarmHiCache needs "interface_v1": 1: SGLang copies every page without it')
