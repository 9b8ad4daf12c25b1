"""`RewarmL2Adapter`: LMCache's second level on a Rewarm store. Objects are read and written where they lie, no copies.

LMCache's store and prefetch controllers call it, each from a thread of its own. Every task is answered, and only when
the kernel has let go of its memory: what the store fails, refuses or does not do in time is a missing bit, counted by
cause. What is there after a restart, or was written by another server, is found: look-ups ask the store.

Space is the store's own: at its capacity it evicts its oldest segments; LMCache is told the usage. `delete` hides an
object at once, and its bytes go with their segment.
"""

from __future__ import annotations

import ctypes
import heapq
import importlib
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rewarm.connectors.common import Failures
from rewarm.connectors.lmcache.keys import OPAQUE, layout_of, name_of, read_options
from rewarm.connectors.lmcache.versions import installed_version, release_of
from rewarm.connectors.lmcache.waiting import Completions, Locks, log
from rewarm.errors import RewarmError, StorageError
from rewarm.store.contract import GOOD_OUTCOMES, SAVE_QUEUE_BYTES, Outcome, Transfer
from rewarm.tiers.opening import open_tier

SAVE_DEADLINE_S = 60.0
"""Saves wait behind a full queue; a deadline below this would drop what a slow drive still writes."""
STOP_S = 10.0
"""How long `close` waits for memory that the kernel still holds, after the store has finished its saves."""
HIDDEN_MAX = 100_000
"""Deleted and failed objects that are a miss until they are stored again; above it the oldest are forgotten."""
KNOWN_MAX = 1_000_000
"""Objects whose key and size are remembered for listings and usage, about 500 bytes each."""

_api = importlib.import_module("lmcache.v1.distributed.api")
_base = importlib.import_module("lmcache.v1.distributed.l2_adapters.base")
_Bitmap: Any = importlib.import_module("lmcache.lmcache_native").Bitmap
_StoreResult: Any = importlib.import_module("lmcache.v1.distributed.internal_api").L2StoreResult
_new_event: Any = importlib.import_module("lmcache.v1.platform").create_event_notifier
_L2AdapterInterface: Any = _base.L2AdapterInterface


class RewarmL2Adapter(_L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there when types are checked
    """An `L2AdapterInterface` of LMCache's multiprocess server; see the module. Methods do what LMCache documents."""

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None, **_later: Any) -> None:
        """Open the store named by `config` (`adapter_params`). Raises `ConfigError` and `StorageError`."""
        options = read_options(config, release_of(installed_version()))
        super().__init__()  # without a capacity: the store evicts by itself
        self._url, self._deadline_s = options.url, options.deadline_s
        self._store = open_tier(_with_queue(options.url, l1_memory_desc), namespace=options.namespace)
        self._registered_bytes = 0 if l1_memory_desc is None else self._store.register(_arena(l1_memory_desc))
        self._completions, self._locks, self._lock = Completions(), Locks(), threading.Lock()
        self._events = {kind: _new_event() for kind in ("save", "look-up", "load")}
        self._results: dict[str, dict[int, Any]] = {kind: {} for kind in self._events}
        self._tasks = itertools.count()  # its next() is one step of the interpreter, from any thread
        self._hidden: dict[Any, None] = {}
        self._known: dict[Any, tuple[bytes, int]] = {}
        self._failures = Failures(log)
        log.info("rewarm: opened %s: %s", self._url, self.report_status())

    def get_store_event_fd(self) -> int:
        """Readable when a store task is over."""
        return int(self._events["save"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a look-up is over."""
        return int(self._events["look-up"].fileno())

    def get_load_event_fd(self) -> int:
        """Readable when a load task is over."""
        return int(self._events["load"].fileno())

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start to store objects; returns the task."""
        return self._submit("save", keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Results of store tasks since the last call; one is good when all of its objects are stored."""
        with self._lock:
            results, self._results["save"] = self._results["save"], {}
        return results

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Look objects up, in memory, and keep the store from evicting those that are there."""
        task, held = next(self._tasks), []
        try:
            found = self._find(keys, group_layout_descs)
            pin = self._store.pin(list(found.values()))
            held = [i for i, there in zip(found, pin.mask.tolist(), strict=True) if there]
            self._locks.lock([keys[i] for i in held], pin)
        except RewarmError as error:
            self._failures.note(f"look-up: {error}", len(keys))
        self._answer("look-up", task, _bitmap(len(keys), held))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """The bitmap of a look-up, once; None before it is over."""
        with self._lock:
            return self._results["look-up"].pop(task_id, None)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Let the store evict what a look-up has locked."""
        self._locks.unlock(keys)

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Start to read objects into LMCache's memory; returns the task."""
        return self._submit("load", keys, objects)

    def query_load_result(self, task_id: int) -> Any:
        """The bitmap of a load, once; None before it is over."""
        with self._lock:
            return self._results["load"].pop(task_id, None)

    def delete(self, keys: Sequence[Any]) -> None:
        """Make objects a miss until they are stored again; locked ones are left alone."""
        self._forget([key for key in keys if key not in self._locks.held], hide=True)

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """A page, in a fixed order, of what this server has stored or loaded and the store still has."""
        if page_size <= 0:
            raise ValueError(f"page_size must be above 0, got {page_size}")
        after = bytes.fromhex(cursor or "")
        with self._lock:
            known = [(*place, key) for key, place in self._known.items() if model_name in (None, key.model_name)]
        page = heapq.nsmallest(page_size + 1, (e for e in known if e[0] > after), key=lambda entry: entry[0])
        there = self._store.lookup([block for block, _, _ in page]).mask.tolist()
        entries = [
            _api.KeyEntry(key.to_encoded_object_key(), size)
            for (_, size, key), held in zip(page[:page_size], there, strict=False)
            if held
        ]
        return _api.KeyListPage(tuple(entries), page[-2][0].hex() if len(page) > page_size else None)

    def get_usage(self) -> Any:
        """Bytes on the medium, of all servers, and its capacity; by salt what this server has stored or loaded."""
        stats = self._store.stats()
        return _base.AdapterUsage(stats.used_bytes, stats.capacity_bytes, super().get_usage().bytes_by_cache_salt)

    def get_memory_tags(self) -> Any:
        """Asked for from 0.5.7 on: storage, remote where LMCache was told that other hosts share it."""
        residency = _api.MemoryResidency.REMOTE if self._shared else _api.MemoryResidency.LOCAL
        return _api.MemoryTags(_api.MemorySegment.STORAGE, residency)

    def report_status(self) -> dict[str, Any]:
        """What the store has, and what it failed to do, for LMCache's status page."""
        stats = self._store.stats()
        return {
            "is_healthy": self._completions.alive(),
            "type": type(self).__name__,
            "url": self._url,
            "device": stats.device,
            "stored_object_count": stats.blocks,
            "current_size_bytes": stats.used_bytes,
            "max_capacity_bytes": stats.capacity_bytes,
            "locked_key_count": len(self._locks.held),
            "registered_bytes": self._registered_bytes,
            "unreleased_bytes": stats.unreleased_bytes,
            "failures": dict(self._failures.counts),
            "notes": [*stats.device_refusals, *stats.notes],
        }

    def close(self) -> None:
        """Finish saves within the store's bound, give loads up, end.

        Raises `StorageError` while the kernel holds memory of LMCache: it must not be unmapped then.
        """
        self._store.close()
        self._locks.release(math.inf)
        if not self._completions.stop(STOP_S):
            raise StorageError("rewarm: the storage still holds memory of LMCache; it is not unmapped")
        for event in self._events.values():
            event.close()

    def _submit(self, kind: str, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        task = next(self._tasks)
        try:
            layouts = [_layout(item.meta) for item in objects]
            blocks = [name_of(key) + layout for key, layout in zip(keys, layouts, strict=True)]
            views = [memoryview(item.byte_array).cast("B") for item in objects]
            transfer = (self._store.save if kind == "save" else self._store.load)(blocks, views)
        except (RewarmError, NotImplementedError) as error:
            self._failures.note(f"{kind}: {error}", len(keys))
            self._answer(kind, task, _StoreResult(False, 0) if kind == "save" else _bitmap(len(keys), []))
            return task
        places = [(block, view.nbytes) for block, view in zip(blocks, views, strict=True)]
        limit_s = SAVE_DEADLINE_S if kind == "save" else self._deadline_s
        self._completions.add(transfer, limit_s, lambda: self._over(kind, task, transfer, keys, places))
        return task

    def _over(
        self, kind: str, task: int, transfer: Transfer, keys: Sequence[Any], places: Sequence[tuple[bytes, int]]
    ) -> None:
        """Account for a transfer and answer its task, even where a listener of LMCache fails."""
        outcomes = transfer.outcomes
        good = [i for i, outcome in enumerate(outcomes) if outcome in GOOD_OUTCOMES]
        moved = sum(places[i][1] for i in good if outcomes[i] is Outcome.STORED)
        result = _StoreResult(len(good) == len(keys), moved) if kind == "save" else _bitmap(len(keys), good)
        try:
            self._failures.note_outcomes(f"{kind}:", outcomes)
            broken = [k for k, o in zip(keys, outcomes, strict=True) if o not in (*GOOD_OUTCOMES, Outcome.MISSING)]
            if kind == "load" and broken:
                self._forget(broken, hide=True)
            self._remember({keys[i]: places[i] for i in good})
            if kind == "load":
                self._notify_keys_accessed([keys[i] for i in good])
        finally:
            self._answer(kind, task, result)

    def _answer(self, kind: str, task: int, result: Any) -> None:
        with self._lock:
            self._results[kind][task] = result
        self._events[kind].notify()

    def _find(self, keys: Sequence[Any], descriptions: Mapping[int, Any]) -> dict[int, bytes]:
        """Position -> block of the keys that the store has. What it has evicted is reported."""
        described = {
            group: [layout_of(d.shapes, d.dtypes), OPAQUE] if d.shapes else [OPAQUE]
            for group, d in descriptions.items()
        }
        candidates = [
            (i, name + layout)
            for i, key in enumerate(keys)
            if key not in self._hidden
            for name in [name_of(key)]
            for layout in described.get(key.object_group_id, [OPAQUE])
        ]
        mask = self._store.lookup([block for _, block in candidates]).mask.tolist()
        found = {i: block for (i, block), there in zip(candidates, mask, strict=True) if there}
        self._forget([key for i, key in enumerate(keys) if i not in found and key in self._known], hide=False)
        return found

    def _remember(self, there: Mapping[Any, tuple[bytes, int]]) -> None:
        """Account for objects that are there: stored now, or found of an earlier server."""
        with self._lock:
            new = [key for key in there if key not in self._known]
            self._known.update(there)
            for key in there:
                self._hidden.pop(key, None)
            oldest = list(itertools.islice(self._known, max(0, len(self._known) - KNOWN_MAX)))
        if new:
            self._notify_keys_stored(new, [there[key][1] for key in new])
        self._forget(oldest, hide=False)

    def _forget(self, keys: Sequence[Any], *, hide: bool) -> None:
        """Report objects as deleted; with `hide` they are a miss until they are stored again."""
        with self._lock:
            if hide:
                self._hidden.update(dict.fromkeys(keys))
                for key in list(itertools.islice(self._hidden, max(0, len(self._hidden) - HIDDEN_MAX))):
                    del self._hidden[key]
            sizes = {key: self._known.pop(key)[1] for key in keys if key in self._known}
        if sizes:
            self._notify_keys_deleted(list(sizes), list(sizes.values()))


def _bitmap(count: int, ones: Sequence[int]) -> Any:
    """A bitmap of LMCache with some bits set."""
    bitmap = _Bitmap(count)
    for i in ones:
        bitmap.set(i)
    return bitmap


def _with_queue(url: str, description: Any) -> str:
    """The URL with room for saves of half the first level, where that is more than a store allows by itself.

    A prompt is stored in one task, and lies in the first level meanwhile: refusing its end would gain nothing.
    """
    half = 0 if description is None else description.size // 2
    if half <= SAVE_QUEUE_BYTES or "save_queue=" in url or url.endswith(".toml"):
        return url
    return f"{url}{'&' if '?' in url else '?'}save_queue={half}"


def _layout(meta: Any) -> bytes:
    """The layout of an object; LMCache's own tools fill in the old fields, for objects of one part."""
    return layout_of([meta.shape], [meta.dtype]) if meta.shapes is None else layout_of(meta.shapes, meta.dtypes)


def _arena(description: Any) -> memoryview:
    """LMCache's first level, or as much of it as stays where it is while it grows."""
    stable = getattr(description, "stable_registration_size", None)
    count = description.size if stable is None else stable
    return memoryview((ctypes.c_ubyte * count).from_address(description.ptr)).cast("B")
