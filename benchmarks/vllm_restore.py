"""Cold restore in the real engine, beside recompute and vLLM's own file-system tier: seconds to the first token.

    .venv-vllm/bin/python benchmarks/vllm_restore.py [--rounds 3] [--directory DIR]

Runs in the engine's environment (make engine-env). Every figure comes from a process with a fresh engine, forked from
one that has imported vLLM. A tier is filled by one process and read by others: nothing is left of the prompt but the
files, whose pages are dropped from the page cache before each round. Rounds are interleaved: recompute, vLLM's tier,
Rewarm, and again. The model has random weights, 8 layers, 16 KiB of KV a token in float32, and runs on the CPU:
recompute is slower, and the ratio larger, than on a GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _child import in_child
from _media import drop_pages

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = (4096, 8192)
BLOCK_TOKENS = 64
REGION_BYTES = 512 << 20
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(os.cpu_count()),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    """Fill the tiers, run the rounds, print medians."""
    parser = argparse.ArgumentParser(description="Cold restore in vLLM, beside recompute and vLLM's own tier.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where both tiers keep their files; default: a temporary one")
    arguments = parser.parse_args()
    os.environ.update({**SETTINGS, **{name: os.environ[name] for name in SETTINGS if name in os.environ}})
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "cache"))
    import vllm  # noqa: F401  # once, for all processes

    folder = Path(tempfile.mkdtemp(prefix="rewarm-vllm-", dir=arguments.directory))
    try:
        in_child(folder, lambda: make_model(folder / "model"))
        measure(folder, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, rounds: int) -> None:
    """Fill, then restore round by round."""
    tiers = {"vllm fs": fs_tier(folder / "fs"), "rewarm": rewarm_tier(folder / "rewarm")}
    for tier in tiers.values():
        in_child(folder, lambda tier=tier: fill(folder / "model", tier))  # type: ignore[misc]
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for name, tier in {"recompute": None, **tiers}.items():
            drop_pages(folder)
            for length, took, cached in in_child(folder, lambda tier=tier: restore(folder / "model", tier)):  # type: ignore[misc]
                assert name == "recompute" or cached >= length - BLOCK_TOKENS, f"{name} restored {cached} of {length}"
                seconds.setdefault((name, length), []).append(took)
    print(f"seconds to the first token, {rounds} interleaved rounds: median (all)")
    for length in LENGTHS:
        slow = statistics.median(seconds["recompute", length])
        for name in ("recompute", *tiers):
            times = seconds[name, length]
            middle = statistics.median(times)
            everything = " ".join(f"{one:.3f}" for one in times)
            print(f"{length} tokens  {name:10} {middle:7.3f}  ({everything})  recompute / this {slow / middle:.1f}")


def make_model(path: Path) -> None:
    """Write the model."""
    from tests.engine.models import make

    make(str(path), **SIZES)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens of one context."""
    dice = random.Random(length + seed)
    return [dice.randrange(3, 250) for _ in range(length)]


def start(model: Path, tier: dict[str, Any] | None) -> Any:
    """A fresh engine, warmed with a short prompt of its own."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        seed=0,
        block_size=BLOCK_TOKENS,
        max_model_len=max(LENGTHS) + 256,
        max_num_batched_tokens=max(LENGTHS) + 256,
        max_num_seqs=4,
        kv_transfer_config=KVTransferConfig(**tier) if tier else None,
        distributed_executor_backend="uni",
    )
    first_token(llm, prompt(100, seed=os.getpid()))
    return llm


def first_token(llm: Any, tokens: list[int], stored: bool = True) -> tuple[float, int]:
    """(seconds to the first token of an answer, prompt tokens that were not computed); `stored`: may be offloaded."""
    from vllm import SamplingParams

    extra = None if stored else {"kv_transfer_params": {"max_offload_tokens": 0}}
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, extra_args=extra)
    start_s = time.monotonic()
    (output,) = llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
    return time.monotonic() - start_s, output.num_cached_tokens


def fill(model: Path, tier: dict[str, Any]) -> None:
    """Compute every context once and have it stored."""
    llm = start(model, tier)
    for length in LENGTHS:
        first_token(llm, prompt(length))
        first_token(llm, prompt(100, seed=length))  # a step more: stores of a request start with the next one
    settle(llm)


def settle(llm: Any) -> None:
    """Wait until everything is stored, and end the engine."""
    from vllm.v1.kv_offload.base import ScheduleEndContext

    manager = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.manager
    while manager.has_pending_work():
        manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        time.sleep(0.01)
    llm.llm_engine.engine_core.engine_core.shutdown()


def restore(model: Path, tier: dict[str, Any] | None) -> list[tuple[int, float, int]]:
    """(length, seconds, tokens restored) of every context."""
    llm = start(model, tier)
    found = [(length, *first_token(llm, prompt(length))) for length in LENGTHS]
    llm.llm_engine.engine_core.engine_core.shutdown()
    return found


def transfer_config(connector: dict[str, Any], tier: dict[str, Any]) -> dict[str, Any]:
    """vLLM's configuration of one tier below its region, on the CPU platform."""
    return {
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        **connector,
        "kv_connector_extra_config": {
            "spec_name": "RewarmCpuSpec",
            "spec_module_path": "rewarm.connectors.vllm_cpu",
            "cpu_bytes_to_use": REGION_BYTES,
            "secondary_tiers": [tier],
        },
    }


def fs_tier(path: Path) -> dict[str, Any]:
    """vLLM's own tier, with its defaults."""
    path.mkdir()
    return transfer_config({"kv_connector": "OffloadingConnector"}, {"type": "fs", "root_dir": str(path)})


def rewarm_tier(path: Path) -> dict[str, Any]:
    """Rewarm, with its defaults."""
    path.mkdir()
    return transfer_config(
        {"kv_connector": "RewarmConnector", "kv_connector_module_path": "rewarm.connectors.vllm"},
        {"type": "RewarmTier", "module_path": "rewarm.connectors.vllm", "url": f"file://{path}?capacity=4GiB"},
    )


if __name__ == "__main__":
    main()
