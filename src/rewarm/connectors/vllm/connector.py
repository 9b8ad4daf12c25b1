"""`RewarmConnector`: vLLM's own offloading connector, with what a persistent tier below it needs to be safe.

It adds four things and changes nothing else:

* the identity of the model, for the namespace of every `RewarmTier` below: vLLM does not tell tiers which weights,
  configuration and overrides they serve;
* a refusal to start when block hashes change with the process, because nothing would ever be found again;
* a bound on waiting: a request whose restore has not ended by the deadline is computed. Its rows stay reserved until
  the storage has let go of them, so a late completion cannot reach memory in use;
* compute or load: before a request is looked up, its tiers decide how much of it is worth loading, by what they
  measure and by what prefill costs here, which they learn from the steps of the engine.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import msgspec

from rewarm.connectors.vllm.identity import identify
from rewarm.connectors.vllm.tier import DEADLINE_S
from rewarm.connectors.vllm.traffic import log
from rewarm.connectors.vllm.versions import Interface, interface
from rewarm.errors import ConfigError
from rewarm.units import parse_duration

TIER = "RewarmTier"

_engine = interface()
_OffloadingConnector: Any = _engine.OffloadingConnector


class RewarmConnector(_OffloadingConnector):  # type: ignore[misc]  # vLLM is not there when types are checked
    """vLLM's `OffloadingConnector` over tiers that outlive the process; see the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Start one side of the connector. Raises `ConfigError` with what to change."""
        tiers = tiers_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_policy(vllm_config.kv_transfer_config)
        if role == _engine.connector_base.KVConnectorRole.SCHEDULER:
            check_hash_seed(_engine, str(vllm_config.cache_config.prefix_caching_hash_algo))
            vllm_config = with_identity(vllm_config, _engine.kv_copies(kv_cache_config))
        self._patience = Patience(max(_deadline_s(tier) for tier in tiers))
        super().__init__(vllm_config, role, kv_cache_config)
        self._tiers, self._near = _engine.tiers_below(self, TIER)
        for tier in self._tiers:
            tier.say_what_fits(vllm_config.model_config.max_model_len)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """As vLLM asks; a request that has waited for the deadline gets what is there without waiting: nothing."""
        for tier in self._tiers:
            tier.choose(request, num_computed_tokens, self._near)
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found is None and self._patience.is_over(request.request_id):
            log.warning("rewarm: request %s is computed: its restore did not end in time", request.request_id)
            self._forget(request.request_id)
            return 0, False
        if found is not None:
            self._patience.forget(request.request_id)
        return found, later

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As vLLM asks, once a step."""
        for tier in self._tiers:
            tier.pace.began(scheduler_output, time.monotonic())
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM asks, when a step has ended."""
        for tier in self._tiers:
            tier.pace.ended(time.monotonic())
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM asks."""
        self._patience.forget(request.request_id)
        self._forget(request.request_id)
        result: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return result

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM asks."""
        self._patience.forget(request.request_id)
        self._forget(request.request_id)
        result: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return result

    def _forget(self, request: str) -> None:
        for tier in self._tiers:
            tier.forget(request)


class Patience:
    """Since when each request waits, and whether that is too long."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._since_s: dict[str, float] = {}

    def is_over(self, request: str) -> bool:
        """True when a request, waiting now, has waited longer than the deadline."""
        now_s = time.monotonic()
        return now_s - self._since_s.setdefault(request, now_s) > self._deadline_s

    def forget(self, request: str) -> None:
        """A request waits no longer."""
        self._since_s.pop(request, None)


def tiers_of(extra_config: Any) -> list[dict[str, Any]]:
    """The configurations of Rewarm's tiers. Raises `ConfigError` when there is none."""
    tiers = [tier for tier in extra_config.get("secondary_tiers", ()) if tier.get("type") == TIER]
    if not tiers:
        raise ConfigError(
            f'RewarmConnector needs a tier {{"type": "{TIER}", "module_path": "rewarm.connectors.vllm", "url": ..}} '
            "in secondary_tiers; `rewarm connect vllm URL` prints all of it"
        )
    return tiers


def check_policy(kv_transfer_config: Any) -> None:
    """Raise `ConfigError` unless a failed load leads to a computed request: vLLM's default ends the request."""
    if kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError('add "kv_load_failure_policy": "recompute": the default ends a request whose load failed')


def check_hash_seed(engine: Interface, algorithm: str) -> None:
    """Raise `ConfigError` when block hashes of this engine cannot be found again by another process."""
    if engine.seed_changes_with_process(algorithm):
        raise ConfigError(
            f"block hashes of {algorithm} begin with a random seed in every process, nothing stored would be found "
            "again: start vLLM with --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to one number "
            "everywhere"
        )


def with_identity(vllm_config: Any, copies: int) -> Any:
    """A copy of an engine's configuration whose tiers know the model; tiers with a namespace of their own keep it."""
    transfer = vllm_config.kv_transfer_config
    extra = dict(transfer.kv_connector_extra_config)
    unnamed = [tier for tier in tiers_of(extra) if tier.get("namespace") is None]
    if not unnamed:
        return vllm_config
    engine = msgspec.to_builtins(identify(vllm_config, copies))
    extra["secondary_tiers"] = [
        {**tier, "engine": engine} if tier in unnamed else tier for tier in extra["secondary_tiers"]
    ]
    told, told.kv_transfer_config = copy.copy(vllm_config), copy.copy(transfer)
    told.kv_transfer_config.kv_connector_extra_config = extra
    return told


def _deadline_s(tier: dict[str, Any]) -> float:
    return parse_duration(tier["deadline"]) if "deadline" in tier else DEADLINE_S
