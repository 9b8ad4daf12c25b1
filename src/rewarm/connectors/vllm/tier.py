"""`RewarmTier`: the `SecondaryTierManager` that keeps vLLM's blocks in a Rewarm store.

vLLM owns everything above: the copy between GPU and DRAM, ranks, groups, pinning, preemption. All methods run on the
scheduler's thread and return at once; what they do is in `Traffic`. A configuration error stops the start of the
engine; afterwards nothing raises: what the storage cannot do is a miss.

After `reset_cache` (vLLM calls it when weights may have changed in place) the tier neither restores nor stores until
the engine is started anew: its namespace names the weights that were there at the start.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import rewarm.tiers.opening
from rewarm.connectors.common import check_names
from rewarm.connectors.vllm.choosing import NOTHING, Chooser, Prompt, Shape
from rewarm.connectors.vllm.identity import Identity, engine_namespace, named_namespace, short_digest
from rewarm.connectors.vllm.metrics import definitions, observe
from rewarm.connectors.vllm.pace import Pace
from rewarm.connectors.vllm.rows import Rows
from rewarm.connectors.vllm.traffic import Limits, Traffic, log
from rewarm.connectors.vllm.versions import interface
from rewarm.errors import ConfigError, StorageError
from rewarm.geometry.namespace import Namespace
from rewarm.store.contract import Store
from rewarm.tiers.dram import fit_of
from rewarm.tiers.pool import PoolStore
from rewarm.units import format_duration, format_size, parse_duration, parse_size
from rewarm.workload.recorder import Recorder

OPTIONS = (
    "url",
    "namespace",
    "promotion_budget",
    "deadline",
    "prefill_rate",
    "fixed_cost",
    "record",
    "locality",
    "engine",
)
"""Keys of the tier's configuration beside vLLM's own; `engine` is written by `RewarmConnector`."""
PROMOTION_BYTES = 4 << 30
"""More in flight does not make a drive faster; half of the primary region bounds it too."""
DEADLINE_S = 10.0
"""A context of ordinary length is recomputed in less: waiting longer for storage cannot pay."""
FIXED_COST_S = 0.05
"""What a restore takes however small: a few steps of the scheduler, and copies through the primary region."""
REPORT_INTERVAL_S = 1.0
"""vLLM asks after every step; metrics are read every few seconds."""
STOP_S = 10.0
"""How long the end of an engine waits for transfers that the kernel still holds."""

_engine = interface()
_SecondaryTierManager: Any = _engine.SecondaryTierManager


class RewarmTier(_SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there when types are checked
    """A secondary tier of vLLM's tiering offload; see the module."""

    medium = _engine.base.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        """Open the store and try one block. Raises `ConfigError` and `StorageError`, which stop the engine's start."""
        _engine.start_tier(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        check_options(options)
        if options.get("locality") is not None:
            self.locality = _engine.base.Locality(options["locality"])
        config = offloading_spec.config
        identity = msgspec.convert(options["engine"], Identity) if "engine" in options else None
        self._rows = _rows(primary_kv_view, offloading_spec, identity)
        namespace = _namespace(options.get("namespace"), identity, config, self._rows.row_bytes)
        limits = _limits(options, self._rows)
        self._hashes = Hashes.of(config)
        self.pace = Pace(None if options.get("prefill_rate") is None else float(options["prefill_rate"]))
        self._recorder = _recorder(options.get("record"), self._hashes)
        self._recorded: set[str] = set()
        self._serving = True
        self._reported: dict[str, Any] = {}
        self._reported_s = 0.0
        self._store = open_pool(options["url"], namespace, self._hashes.chunk_tokens if self._hashes else None)
        with contextlib.ExitStack() as opened:  # A start that fails leaves no thread and no descriptor behind.
            opened.callback(self._store.close)
            self._holds: Callable[[bytes], bool] = self._store.__contains__
            self._store.register(self._rows.region)
            self._traffic = Traffic(self._store, self._rows, limits)
            opened.callback(self._traffic.stop, STOP_S)
            self._chooser = Chooser(self._store, _shape(options, self._rows, self._hashes), self.pace.curve)
            self._refused = self._chooser.refused
            _log_start(options["url"], self._store, self._rows, limits, namespace)
            try_one_block(self._store, self._rows, limits.deadline_s)
            opened.pop_all()

    # The scheduler asks.

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """HIT or MISS from memory; RETRY only while loads under way use up the budget of the primary region."""
        traffic = self._traffic  # this runs for every block of every waiting request: no call that is not needed
        if not self._holds(key) or key in traffic.failed:
            return _MISS
        if self._refused and key in self._refused.get(req_context.req_id, NOTHING):
            return _MISS
        if traffic.offers <= 0:
            return _RETRY
        traffic.offers -= 1
        return _HIT

    def choose(self, request: Any, computed: int, near: Callable[[bytes], bool]) -> None:
        """Decide once, before a request is looked up, what of it is loaded; `near`: what the primary region holds."""
        if self._recorder is not None and self._hashes is not None and request.request_id not in self._recorded:
            self._recorded.add(request.request_id)
            self._recorder.lookup(self._hashes.keys(request.block_hashes, 0), request.num_tokens)
        if self._hashes is not None and self._serving and not self._chooser.has_chosen(request.request_id):
            keys = self._hashes.keys(request.block_hashes, computed)
            prompt = Prompt(request=request.request_id, keys=keys, tokens=request.num_tokens, computed=computed)
            self._chooser.choose(prompt, self._traffic.failed, near)

    def say_what_fits(self, tokens: int) -> None:
        """Log what one request of so many tokens needs of the primary region, and the number to set if it is short."""
        if self._hashes is None:
            return
        row_bytes = self._rows.row_bytes
        fit = fit_of(-(-tokens // self._hashes.chunk_tokens) * row_bytes, 1, self._rows.count * row_bytes)
        text = "rewarm: a request of %d tokens has %s in flight, the primary region (cpu_bytes_to_use) holds %s"
        found = tokens, format_size(fit.needed_bytes), format_size(fit.region_bytes)
        if fit.advice:
            log.warning(text + ": its restore is cut short; set %d or more", *found, fit.needed_bytes)
        else:
            log.info(text + ", %.1f such requests at once", *found, fit.requests_at_once)

    def forget(self, request: str) -> None:
        """A request is over."""
        self._chooser.forget(request)
        self._recorded.discard(request)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to restore the blocks of one request."""
        self._chooser.submitted(job_metadata.req_context.req_id, len(job_metadata.keys))
        self._traffic.load(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids)

    def submit_store(self, job_metadata: Any) -> None:
        """Start to store blocks."""
        keys = list(job_metadata.keys) if self._serving else []
        if self._recorder is not None and keys:
            self._recorder.save(keys)
        self._traffic.save(job_metadata.job_id, keys, job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Jobs whose verdicts are in and whose rows the store has released."""
        return [
            _engine.job_result(job.job, job.good is None, job.good, job.seconds, job.moved_bytes)
            for job in self._traffic.finished()
        ]

    def has_pending_work(self) -> bool:
        """True while a job is under way, so that the engine keeps asking."""
        return self._traffic.busy()

    def on_new_request(self, req_context: Any) -> Any:
        """Blocks are offloaded as they are computed."""
        return _engine.base.RequestOffloadingContext()

    def on_schedule_end(self, context: Any) -> None:
        """Offers that led to no load in this step are void."""
        self._traffic.end_step()

    # Reset and end.

    def drain_jobs(self) -> None:
        """Wait until no job touches the rows, then stop serving: see the module."""
        self._traffic.drain()
        if self._serving:
            self._serving = False
            self._holds = _never
            log.warning("rewarm: the engine's cache was reset; nothing is restored or stored until it is started anew")

    def shutdown(self) -> None:
        """Finish saves within the store's bound and end. Raises `StorageError` while the kernel holds rows."""
        self._traffic.stop(STOP_S)
        self._store.close()
        if not self._traffic.wait_released(STOP_S):
            raise StorageError("rewarm: the storage still holds memory of the primary region; it is not unmapped")
        self._rows.release()
        if self._recorder is not None:
            self._recorder.close()
            lost = self._recorder.failure or f"{self._recorder.dropped} events dropped"
            log.info("rewarm: recorded to %s, %s", self._recorder.path, lost)

    # Metrics.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Metrics of this tier, in vLLM's own terms."""
        return definitions(_engine.base)

    def get_stats(self) -> Any:
        """What changed since the last report, as vLLM's stats; None between reports."""
        now_s = time.monotonic()
        if now_s - self._reported_s < REPORT_INTERVAL_S:
            return None
        self._reported_s = now_s
        return observe(_engine.Stats(), self._store.stats(), self._traffic, self._chooser, self._reported)


_MISS, _HIT, _RETRY = (
    _engine.base.LookupResult.MISS,
    _engine.base.LookupResult.HIT,
    _engine.base.LookupResult.RETRY,
)


def _never(key: bytes) -> bool:
    """What a tier holds that no longer serves."""
    return False


def check_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unknown or missing key of the tier's configuration."""
    check_names(options, OPTIONS[:-1], "the tier RewarmTier", OPTIONS[-1:])


def try_one_block(store: Store, rows: Rows, timeout_s: float) -> bool:
    """Save one row, load it into another, compare, log. False when it did not come back; the engine starts anyway.

    Rows are free when the engine starts. A region of one row is tried with its own content.
    """
    source, target = rows.blocks([0])[0], rows.blocks([rows.count - 1])[0]
    key = b"rewarm round trip" + os.urandom(16)
    start_s = time.monotonic()
    source[:8] = memoryview(os.urandom(8))
    saving = store.save([key], [source])
    stored = saving.wait(timeout_s)[0]
    stored_s = time.monotonic()
    loading = store.load([key], [target])
    back = loading.wait(timeout_s)[0] and target[:8].tobytes() == source[:8].tobytes()
    released = saving.wait_released(timeout_s) and loading.wait_released(timeout_s)
    if not released:
        raise StorageError(f"rewarm: the storage did not finish one block within {format_duration(2 * timeout_s)}")
    size, device = format_size(rows.block_bytes), store.stats().device
    if stored and back:
        log.info(
            "rewarm: one block of %s stored in %s and restored in %s through %s",
            size,
            format_duration(stored_s - start_s),
            format_duration(time.monotonic() - stored_s),
            device,
        )
    else:
        log.warning(
            "rewarm: one block of %s did not come back through %s: save %s, load %s",
            size,
            device,
            saving.outcomes[0],
            loading.outcomes[0],
        )
    return stored and back


def open_pool(url: str, namespace: Namespace, block_tokens: int | None) -> PoolStore:
    """Open what a URL names. One medium is a pool of one: it is measured, and served in order, like several."""
    store = rewarm.tiers.opening.open_tier(url, namespace=namespace, block_tokens=block_tokens)
    return store if isinstance(store, PoolStore) else PoolStore([(url.partition("?")[0], store)])


class Hashes(msgspec.Struct, frozen=True):
    """How vLLM's block hashes become keys: one for every `per_chunk` hashes, `chunk_tokens` tokens."""

    per_chunk: int
    chunk_tokens: int
    suffix: bytes

    @classmethod
    def of(cls, config: Any) -> Hashes | None:
        """From an engine's `OffloadingConfig`; None where several kinds of layers make keys of different meaning."""
        if len(config.groups) != 1:
            log.info("rewarm: compute or load is off: the model has %d kinds of layers", len(config.groups))
            return None
        (group,) = config.groups
        tokens = group.tokens_per_block * config.cache.blocks_per_chunk
        return cls(tokens // config.cache.tokens_per_hash, tokens, group.group_id.to_bytes(4, "big"))

    def keys(self, hashes: Sequence[bytes], computed: int) -> list[bytes]:
        """Keys of the whole blocks that come after the first `computed` tokens."""
        first = computed // self.chunk_tokens * self.per_chunk + self.per_chunk - 1
        return [hashes[number] + self.suffix for number in range(first, len(hashes), self.per_chunk)]


def _recorder(path: Any, hashes: Hashes | None) -> Recorder | None:
    """The recording that the option `record` asks for."""
    if path is None:
        return None
    if hashes is None:
        raise ConfigError("record: requests of a model with several kinds of layers cannot be recorded; leave it out")
    recorder = Recorder(Path(str(path)), hashes.chunk_tokens)
    log.info("rewarm: recording lookups and saves to %s, keys hashed", recorder.path)
    return recorder


def _shape(options: Mapping[str, Any], rows: Rows, hashes: Hashes | None) -> Shape:
    fixed_s = parse_duration(options["fixed_cost"]) if "fixed_cost" in options else FIXED_COST_S
    return Shape(
        block_bytes=rows.block_bytes, block_tokens=hashes.chunk_tokens if hashes is not None else 1, fixed_s=fixed_s
    )


def _rows(view: memoryview, spec: Any, identity: Identity | None) -> Rows:
    config = spec.config
    copies = identity.copies if identity else 1
    one_copy = bool(getattr(spec, "replicated_layout", False)) or config.canonical_layout
    if one_copy or copies != config.parallel.world_size:
        copies = 1  # stored whole: some ranks differ, or vLLM keeps one copy itself
    part_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    return Rows(view, copies=copies, part_bytes=part_bytes if copies > 1 else None)


def _namespace(name: Any, identity: Identity | None, config: Any, row_bytes: int) -> Namespace:
    if name is not None:
        return named_namespace(str(name), config, row_bytes, _engine.layout_name())
    if identity is not None:
        return engine_namespace(identity, config, row_bytes, _engine.layout_name())
    raise ConfigError(
        "the tier RewarmTier does not know which model it serves: use the connector RewarmConnector "
        '("kv_connector_module_path": "rewarm.connectors.vllm"), or give the tier a "namespace"'
    )


def _limits(options: Mapping[str, Any], rows: Rows) -> Limits:
    promotion = parse_size(options["promotion_budget"]) if "promotion_budget" in options else PROMOTION_BYTES
    deadline_s = parse_duration(options["deadline"]) if "deadline" in options else DEADLINE_S
    if promotion <= 0 or deadline_s <= 0:
        raise ConfigError("promotion_budget and deadline of the tier RewarmTier must be above 0")
    half = max(1, rows.count // 2)
    promotion_rows = max(1, min(promotion // rows.row_bytes, half))
    return Limits(promotion_rows=promotion_rows, save_rows=half, deadline_s=deadline_s)


def _log_start(url: str, store: Store, rows: Rows, limits: Limits, namespace: Namespace) -> None:
    stats = store.stats()
    log.info(
        "rewarm: %s, device %s, namespace %s, %d blocks there; rows of %s, %s in flight at most, deadline %s%s",
        url,
        stats.device,
        short_digest(namespace),
        stats.blocks,
        format_size(rows.row_bytes),
        format_size(limits.promotion_rows * rows.row_bytes),
        format_duration(limits.deadline_s),
        "; one of equal copies stored" if rows.replicated else "",
    )
    for refusal in stats.device_refusals:
        log.info("rewarm: a faster device was not used: %s", refusal)
