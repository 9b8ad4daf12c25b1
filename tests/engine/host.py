"""Runs inside the engine's own environment: imports vLLM once, then forks one engine per connection (tests/forks.py).

host.py SOCKET
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from typing import Any

from tests.forks import serve

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # compiling a sampler takes longer than a test
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


def main(path: str) -> None:
    """Import, then serve."""
    for module in ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "rewarm.connectors.vllm_cpu"):
        importlib.import_module(module)
    for model in ("qwen3", "gemma2", "deepseek_v2"):
        importlib.import_module(f"vllm.model_executor.models.{model}")
    serve(path, Engine)


class Engine:
    """One engine of vLLM, driven by a client."""

    def __init__(self) -> None:
        self.llm: Any = None

    def make_model(self, **options: Any) -> dict[str, Any]:
        """Write a model with random weights."""
        from tests.engine import models

        models.make(**options)
        return {}

    def start(
        self,
        model: str,
        kv: dict[str, Any] | None,
        stall: bool = False,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Start the engine; with `stall` the medium accepts reads and never answers them once `hang` is called."""
        os.environ.update(environment or {})
        if stall:
            self._stall_reads()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        start_s = time.monotonic()
        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            seed=0,
            block_size=options.pop("block_size", 32),
            max_num_seqs=8,
            kv_transfer_config=KVTransferConfig(**kv) if kv else None,
            distributed_executor_backend=options.pop("executor", "uni"),
            **options,
        )
        return {"pid": os.getpid(), "start_s": time.monotonic() - start_s, "version": vllm_version()}

    def generate(self, prompts: list[list[int]], tokens: int = 8, salt: str | None = None) -> dict[str, Any]:
        """Greedy tokens, their log-probabilities and the number of prompt tokens not computed, per prompt."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        start_s = time.monotonic()
        salted = {"cache_salt": salt} if salt else {}
        outputs = self.llm.generate([{"prompt_token_ids": p, **salted} for p in prompts], parameters, use_tqdm=False)
        return {
            "seconds": time.monotonic() - start_s,
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "logprobs": [[next(iter(d.values())).logprob for d in o.outputs[0].logprobs] for o in outputs],
            "cached": [o.num_cached_tokens for o in outputs],
        }

    def settle(self) -> dict[str, Any]:
        """Wait until everything stored so far is published; returns what the tier counted."""
        tier = self._tier()
        core = self._core()
        deadline_s = time.monotonic() + 60
        while core.scheduler.connector.has_pending_push_work() or tier.has_pending_work():
            core.scheduler.connector.scheduler.manager.on_schedule_end(_no_requests())
            time.sleep(0.002)
            assert time.monotonic() < deadline_s, "the tier is still busy"
        tier._store.flush()
        tier._store.refresh()
        return self.counters()

    def counters(self) -> dict[str, Any]:
        """What the tier and its store counted."""
        tier = self._tier()
        stats = tier._store.stats()
        return {
            "failures": dict(tier._traffic.failures.counts),
            "loaded_bytes": tier._traffic.loaded_bytes,
            "saved_bytes": tier._traffic.saved_bytes,
            "blocks": stats.blocks,
            "bytes_read": stats.bytes_read,
            "device": stats.device,
        }

    def forget(self) -> dict[str, Any]:
        """Drop the KV in the engine's own memory and in the region, so that only the store has it."""
        self.llm.reset_prefix_cache()
        manager = self._core().scheduler.connector.scheduler.manager
        manager.primary_tier.reset_cache()
        return {}

    def refresh(self) -> dict[str, Any]:
        """Read what other writers published."""
        self._tier()._store.refresh()
        return self.counters()

    def evict(self) -> dict[str, Any]:
        """Drop every sealed segment."""
        return {"freed": self._tier()._store.evict(0)}

    def hang(self, on: bool) -> dict[str, Any]:
        """Make the medium stop, or go on, answering reads."""
        from rewarm.store.devices.base import READ
        from rewarm.testing.faulty import stall

        for device in self._devices:
            if on:
                device.chance(stall(), 1.0, opcode=READ)
            else:
                device.heal()
                device.release_stalled()
        return {}

    def stop(self) -> dict[str, Any]:
        """End the engine in order."""
        self._core().shutdown()
        return {}

    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def _tier(self) -> Any:
        return self._core().scheduler.connector.scheduler.manager.secondary_tiers[0]

    def _stall_reads(self) -> None:
        from rewarm.testing.faulty import FaultyDevice
        from rewarm.tiers import opening

        self._devices: list[Any] = []

        def wrap(device: Any) -> Any:
            self._devices.append(FaultyDevice(device))
            return self._devices[-1]

        opening.open_tier = functools.partial(opening.open_tier, device_wrapper=wrap)


def vllm_version() -> str:
    """The version that runs."""
    return str(importlib.import_module("vllm").__version__)


def _no_requests() -> Any:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    return ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


if __name__ == "__main__":
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    main(sys.argv[1])
