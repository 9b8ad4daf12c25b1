"""What the vLLM tier costs the scheduler's thread: lookup per key, and each step, at 64 requests of 128 blocks.

Run with the engine's environment, whose classes it uses; no model runs:

    .venv-vllm/bin/python benchmarks/vllm_scheduler.py [DIRECTORY]

A step is what the engine calls between two iterations of the model: lookups of every waiting request, loads, stores,
finished jobs, the end of the step. Times are those of our code on that thread, while the store's threads work: on the
wall, and on the processor, which leaves out what other processes take on a busy machine.
"""

from __future__ import annotations

import mmap
import shutil
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

Times = tuple[float, float]

REQUESTS, BLOCKS = 64, 128
ROW_BYTES = 64 << 10
STEP_PAUSE_S = 0.001
"""As vLLM pauses when nothing can run."""


def main() -> None:
    """Measure, print."""
    root = tempfile.mkdtemp(prefix="rewarm-bench-", dir=sys.argv[1] if len(sys.argv) > 1 else None)
    try:
        measure(root)
    finally:
        shutil.rmtree(root)


def measure(root: str) -> None:
    """Store everything in one wave of steps, restore it in another."""
    from rewarm.connectors.vllm import RewarmTier

    rows = REQUESTS * BLOCKS
    region = np.frombuffer(mmap.mmap(-1, rows * ROW_BYTES), np.uint8).reshape(rows, ROW_BYTES)
    region[:] = np.arange(rows, dtype=np.uint32).astype(np.uint8)[:, None]
    tier = RewarmTier(
        offloading_spec=SimpleNamespace(config=offloading(), replicated_layout=False),
        primary_kv_view=memoryview(region),
        tier_type="RewarmTier",
        url=f"file://{root}?capacity=8GiB",
        namespace="benchmark",
        promotion_budget=rows * ROW_BYTES,
    )
    tier._traffic._limits = tier._traffic._limits.__class__(
        promotion_rows=2 * rows, save_rows=2 * rows, deadline_s=60.0
    )
    keys = [[f"{r:08d}{b:08d}".encode() * 2 + b"\0\0\0\0" for b in range(BLOCKS)] for r in range(REQUESTS)]
    report("store", wave(tier, keys, loading=False))
    tier._store.flush()
    lookups: list[int] = []
    report("restore", wave(tier, keys, loading=True, lookups=lookups))
    times = np.array(lookups)
    print(
        f"lookup per key, {len(times)} keys: median {np.median(times) / 1e3:.2f} us, "
        f"p99 {np.percentile(times, 99) / 1e3:.2f} us"
    )
    print(f"device {tier._store.stats().device}, {rows} blocks of {ROW_BYTES >> 10} KiB")
    tier.shutdown()


def wave(tier: Any, keys: list[list[bytes]], *, loading: bool, lookups: list[int] | None = None) -> list[Times]:
    """All requests in one step, then steps until everything is over; times of our code per step."""
    from vllm.v1.kv_offload.base import LookupResult

    clock = both_clocks
    steps = []
    start = clock()
    for request in keys:
        if lookups is not None:
            for key in request:
                before = time.perf_counter_ns()
                found = tier.lookup(key, None)
                lookups.append(time.perf_counter_ns() - before)
                assert found is LookupResult.HIT
    if lookups is not None:
        # The clock itself costs as much as a lookup: the same step once more without it.
        tier.on_schedule_end(None)
        start = clock()
        for request in keys:
            for key in request:
                tier.lookup(key, None)
    for number, request in enumerate(keys):
        rows = np.arange(BLOCKS, dtype=np.int32) + number * BLOCKS
        context = SimpleNamespace(req_id=str(number))
        job = SimpleNamespace(job_id=number, keys=request, chunk_ids=rows, req_context=context)
        (tier.submit_load if loading else tier.submit_store)(job)
    tier.on_schedule_end(None)
    steps.append(since(start))
    left = len(keys)
    while left:
        time.sleep(STEP_PAUSE_S)
        start = clock()
        results = list(tier.get_finished_jobs())
        tier.has_pending_work()
        tier.on_schedule_end(None)
        steps.append(since(start))
        assert all(result.success for result in results)
        left -= len(results)
    return steps


def both_clocks() -> Times:
    """Wall and processor time of this thread, seconds."""
    return time.perf_counter(), time.thread_time()


def since(start: Times) -> Times:
    """What both clocks have run."""
    wall, processor = both_clocks()
    return wall - start[0], processor - start[1]


def report(name: str, steps: list[Times]) -> None:
    """Print the distribution of a wave's steps."""
    for clock, times in zip(("wall", "processor"), np.array(steps).T * 1e3, strict=True):
        print(
            f"{name}, {clock}: {len(times)} steps, first (all requests) {times[0]:.2f} ms, longest "
            f"{times.max():.2f} ms, p50 {np.median(times):.3f} ms, p99 {np.percentile(times, 99):.3f} ms"
        )


def offloading() -> Any:
    """The part of vLLM's configuration that the tier reads."""
    return SimpleNamespace(
        groups=(SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("layer",)),),
        worker_kv_bytes_per_block=ROW_BYTES,
        model=SimpleNamespace(name="none", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )


if __name__ == "__main__":
    main()
