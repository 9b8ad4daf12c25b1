"""As much of vLLM as the connector touches, without what it does: for tests of the connector's own logic."""

from __future__ import annotations

import enum
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class LookupResult(enum.Enum):
    """As vLLM's."""

    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


class Medium(enum.Enum):
    """As vLLM's."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    """As vLLM's."""

    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass(frozen=True)
class Metadata:
    """A metric's definition."""

    documentation: str
    labelnames: tuple[str, ...] = ()


class RequestOffloadingContext:
    """As vLLM's."""


class OffloadingWorker:
    """As vLLM's."""


@dataclass
class TransferJob:
    """As vLLM's."""

    job_id: int
    keys: Any
    chunk_ids: np.ndarray[Any, Any]
    is_promotion: bool = True
    req_context: Any = field(default_factory=lambda: types.SimpleNamespace(req_id="r"))


@dataclass
class OldJobResult:
    """As vLLM's before 0.31."""

    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


@dataclass
class JobResult(OldJobResult):
    """As vLLM's since 0.31."""

    transfer_bytes: int | None = None


class OldSecondaryTierManager:
    """As vLLM's before 0.31."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str) -> None:
        self.tier_type = tier_type
        self.locality = None


class SecondaryTierManager(OldSecondaryTierManager):
    """As vLLM's since 0.31."""

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type)
        self.bp_detector = backpressure


@dataclass
class Stats:
    """As vLLM's OffloadingConnectorStats."""

    counters: dict[Any, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def increase_counter(self, name: str, value: float, labels: tuple[str, ...] = ()) -> None:
        """As vLLM's."""
        key = (name, *labels)
        self.counters[key] = self.counters.get(key, 0) + value

    def set_gauge(self, name: str, value: float) -> None:
        """As vLLM's."""
        self.gauges[name] = value


class Role(enum.Enum):
    """As vLLM's KVConnectorRole."""

    SCHEDULER = 0
    WORKER = 1


class OffloadingConnector:
    """As vLLM's; answers what a test put into `matched`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.config = vllm_config
        self.matched: tuple[int | None, bool] = (None, False)
        primary = types.SimpleNamespace(lookup=lambda key, context: LookupResult.MISS)
        manager = types.SimpleNamespace(secondary_tiers=[], primary_tier=primary)
        scheduler = types.SimpleNamespace(manager=manager)
        self.connector_scheduler = scheduler if role is Role.SCHEDULER else None

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """As vLLM's."""
        return self.matched

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """As vLLM's."""

    def update_connector_output(self, connector_output: Any) -> None:
        """As vLLM's."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """As vLLM's."""
        return False, None

    request_finished_all_groups = request_finished


class Hashes(types.ModuleType):
    """vLLM's module that makes the seed of block hashes; `random` says whether it differs at every call."""

    def __init__(self, name: str, random: bool) -> None:
        super().__init__(name)
        self.calls = 0

        def init_none_hash(function: Any) -> None:
            self.calls += 1
            self.NONE_HASH = f"{self.calls}".encode() if random else b"fixed"

        self.init_none_hash = init_none_hash


def modules(version: str = "0.32.0", random_seed: bool = False) -> dict[str, types.ModuleType]:
    """The modules of a vLLM, by name."""
    old = version.startswith("0.30")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.v1.kv_offload.base": {
            "LookupResult": LookupResult,
            "Medium": Medium,
            "Locality": Locality,
            "RequestOffloadingContext": RequestOffloadingContext,
            "OffloadingCounterMetadata": Metadata,
            "OffloadingGaugeMetadata": Metadata,
            "OffloadingWorker": OffloadingWorker,
        },
        "vllm.v1.kv_offload.tiering.base": {
            "SecondaryTierManager": OldSecondaryTierManager if old else SecondaryTierManager,
            "JobResult": OldJobResult if old else JobResult,
            "TransferJob": TransferJob,
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {"KVConnectorRole": Role},
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics": {"OffloadingConnectorStats": Stats},
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {
            "OffloadingConnector": OffloadingConnector
        },
        "vllm.platforms": {"current_platform": types.SimpleNamespace(device_type="cuda")},
        "vllm.utils.hashing": {"get_hash_fn_by_name": lambda name: name},
    }
    made: dict[str, types.ModuleType] = {}
    for name, values in contents.items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(values)
    made["vllm.v1.core.kv_cache_utils"] = Hashes("vllm.v1.core.kv_cache_utils", random_seed)
    return made


def forget_connector() -> None:
    """Make the next import of the connector find the vLLM that is there then."""
    # The verb goes too: it would keep the old modules, and with them the interface of an earlier engine.
    ours = ("rewarm.connectors.vllm", "rewarm.cli.connect_command")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
