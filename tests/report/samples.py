"""Results to show: a small real run of the benchmark and a plan of the examples, made once per process."""

from __future__ import annotations

import functools
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tests.bench.live.scripted import Scripted

import rewarm
from rewarm.bench.live.run import run_live
from rewarm.bench.replay import run_job
from rewarm.bench.result import Result
from rewarm.bench.stages import Progress
from rewarm.plan import Plan, apply, calibrate, make_plan, make_spec
from rewarm.plan.result import Capacity
from rewarm.workload.job import Job, Server, Target

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plans"


class _Silent:
    def advance(self, amount: float = 1) -> None:
        pass


@contextmanager
def _stage(label: str, total: float) -> Iterator[Progress]:
    yield _Silent()


@functools.cache
def bench_result() -> Result:
    """Real reads: a measured target and two emulated ones, two waves, two repeats, with new tokens to prefill."""
    with tempfile.TemporaryDirectory(prefix="rewarm-report-") as folder:
        job = Job(
            model="Llama-3.1-8B",
            tokens=64,
            block_tokens=16,
            concurrency=(2, 4),
            repeats=2,
            new_tokens=16,
            gpu="L4",
            targets={
                "flash": Target(url=f"file://{folder}"),
                "local": Target(url=f"file://{folder}", emulated_bytes_per_s=3e8),
                "array": Target(url=f"file://{folder}", emulated_bytes_per_s=5e8),
            },
        )
        return run_job(job, _stage, lambda line: None)


@functools.cache
def live_result() -> Result:
    """A real run over HTTP against a scripted server that forgets, once with a tier below it and once without."""
    with Scripted(tier=True, token_s=1e-4, tier_token_s=1e-5) as tiered, Scripted(token_s=1e-4) as plain:
        servers = {
            "tiered": Server(url=tiered.url, restart=tiered.forget_command()),
            "plain": Server(url=plain.url, restart=plain.forget_command(), body={"ignore_eos": True}),
        }
        job = Job(tokens=100, concurrency=(1, 3), repeats=2, output_tokens=6, servers=servers)
        with ThreadPoolExecutor(1) as thread:  # whoever asks may have an event loop of its own, as a browser's driver
            return thread.submit(run_live, job, _stage, lambda line: None).result(60)


@functools.cache
def plan_result() -> Plan:
    """The published wave, calibrated; a hit curve is put in, which a wave has none of."""
    given = tomllib.loads((EXAMPLES / "published-wave.toml").read_text())
    fits = calibrate((EXAMPLES / "published-wave.result.json").read_bytes())
    plan = make_plan(apply(make_spec(given, "plan"), fits), version=rewarm.__version__, given=given, calibration=fits)
    curve = [(0.2, 1_000_000), (0.35, 10_000_000), (0.4, 100_000_000)]
    capacity = tuple(
        Capacity(
            token_hit_rate=rate, cached_tokens=tokens, cached_bytes=tokens * 253_952.0, share_of_possible=rate / 0.4
        )
        for rate, tokens in curve
    )
    return msgspec.structs.replace(plan, capacity=capacity)
