"""A pool of four drives in the real engine, beside vLLM's own tier on one of them; and compute or load.

    sudo .venv-vllm/bin/python benchmarks/vllm_pool.py [--rounds 3] [--images /dev/shm] [--rate 30MB/s]

Runs in the engine's environment (make engine-env). The drives are XFS file systems on loop devices whose reads by this
process the kernel limits to --rate each (see tiers_pool.py: root, cgroup v1 blkio, about 2 GB of room). First a prompt
of 8,192 tokens (134 MB) is restored by fresh engines, vLLM's tier and the pool in turn; expected: 3 times faster. Then
one engine after the other, at falling rates, learns what prefill costs and how fast the drives are, and is asked for
prompts that are stored, between prompts of the same lengths that it computes; expected: what is offered ends before
prefill does. The model and the engine are those of vllm_restore.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiers_pool
import vllm_restore as engine
from rewarm.units import format_rate, parse_rate

LENGTH = 8192
LENGTHS = (2048, LENGTH)
FALLING = (1.0, 0.25, 0.125)
IMAGE_BYTES = 448 << 20
MEASURING = (4864, 1)
"""Length and seed of the prompt whose restore tells the pool its speed: just over 16 MiB from each drive."""
FRESH = 100
"""Seeds from here on are computed, and not stored."""
NOISE = 1.1
"""Times of prefill in one engine differ by so much here."""


def main() -> None:
    """Make the drives, fill them, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=Path("/dev/shm"), help="where the images go")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=parse_rate, default="30MB/s", help="of each of the four drives")
    arguments = parser.parse_args()
    os.environ.update({**engine.SETTINGS, **{n: os.environ[n] for n in engine.SETTINGS if n in os.environ}})
    sys.path.insert(0, str(engine.ROOT))
    os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "cache"))
    import vllm  # noqa: F401  # once, for all processes

    folder = Path(tempfile.mkdtemp(prefix="rewarm-vllm-pool-"))
    try:
        with tiers_pool.throttled(arguments.images, [arguments.rate] * 4, IMAGE_BYTES) as mounts:
            engine.in_child(folder, lambda: engine.make_model(folder / "model"))
            tiers = {"vllm fs": engine.fs_tier(mounts[0] / "fs"), "pool of 4": pool_tier(mounts)}
            measure_ratio(folder, tiers, arguments)
            measure_offers(folder, tiers["pool of 4"], mounts, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pool_tier(mounts: list[Path]) -> dict[str, Any]:
    """Rewarm over all drives, with its defaults."""
    for mount in mounts:
        (mount / "kv").mkdir()
    drives = "&".join(f"drive={mount}/kv" for mount in mounts)
    tier = {"type": "RewarmTier", "module_path": "rewarm.connectors.vllm", "url": f"pool:?{drives}&capacity=800MiB"}
    return engine.transfer_config(
        {"kv_connector": "RewarmConnector", "kv_connector_module_path": "rewarm.connectors.vllm"}, tier
    )


def measure_ratio(folder: Path, tiers: dict[str, Any], arguments: argparse.Namespace) -> None:
    """One prompt, restored by fresh engines in turn."""
    model = folder / "model"
    stored = {"vllm fs": [(LENGTH, 0)], "pool of 4": [(LENGTH, 0), (LENGTHS[0], 0), MEASURING]}
    for name, tier in tiers.items():
        engine.in_child(folder, lambda name=name, tier=tier: fill(model, tier, stored[name]))  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in tiers}
    for _ in range(arguments.rounds):
        for name, tier in tiers.items():
            ((took, cached),) = engine.in_child(folder, lambda tier=tier: answer(model, tier, [(LENGTH, 0)]))  # type: ignore[misc]
            assert cached >= LENGTH - engine.BLOCK_TOKENS, f"{name} restored {cached}"
            seconds[name].append(took)
    print(f"{LENGTH} tokens, drives at {format_rate(arguments.rate)} each, seconds to the first token: median (all)")
    own = statistics.median(seconds["vllm fs"])
    for name, times in seconds.items():
        middle = statistics.median(times)
        everything = " ".join(f"{one:.2f}" for one in times)
        print(f"  {name:10} {middle:6.2f}  ({everything})  vllm fs / this {own / middle:.2f}", flush=True)


def measure_offers(folder: Path, tier: dict[str, Any], mounts: list[Path], arguments: argparse.Namespace) -> None:
    """What is offered at falling rates, and whether it ends before prefill."""
    late = offered = 0
    for share in FALLING:
        rate = arguments.rate * share
        limit(mounts, rate)
        before, after = [[(length, seed) for length in LENGTHS] for seed in (FRESH, FRESH + 1)]
        contexts = [*before, MEASURING, *((length, 0) for length in LENGTHS), *after]
        found = engine.in_child(folder, lambda contexts=contexts: answer(folder / "model", tier, contexts))  # type: ignore[misc]
        times = dict(zip(contexts, found, strict=True))
        for length in LENGTHS:
            took, cached = times[length, 0]
            computed = [times[length, seed][0] for seed in (FRESH, FRESH + 1)]
            offered += cached > 0
            late += cached > 0 and took > NOISE * statistics.mean(computed)
            print(
                f"drives at {format_rate(rate)} each, {length} tokens: {cached} loaded, there after {took:.2f} s; "
                f"computed {computed[0]:.2f} and {computed[1]:.2f} s",
                flush=True,
            )
    print(f"{offered} restores offered, {late} of them ended after prefill")


def limit(mounts: list[Path], rate: float) -> None:
    """Set the rate of the drives for this process and its children."""
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":blkio:" in line)
    group = tiers_pool.CGROUPS / line.split(":", 2)[2].lstrip("/")
    for mount in mounts:
        device = os.stat(mount).st_dev
        text = f"{os.major(device)}:{os.minor(device)} {int(rate)}"
        (group / "blkio.throttle.read_bps_device").write_text(text)


def fill(model: Path, tier: dict[str, Any], contexts: list[tuple[int, int]]) -> None:
    """Compute contexts once and have them stored."""
    llm = engine.start(model, tier)
    for length, seed in contexts:
        engine.first_token(llm, engine.prompt(length, seed))
        engine.first_token(llm, engine.prompt(100, seed=length + seed))  # stores of a request start with the next step
    engine.settle(llm)


def answer(model: Path, tier: dict[str, Any] | None, contexts: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """(seconds to the first token, tokens not computed) of contexts, one after the other, in a fresh engine."""
    llm = engine.start(model, tier)
    found = [engine.first_token(llm, engine.prompt(length, seed), stored=seed < FRESH) for length, seed in contexts]
    llm.llm_engine.engine_core.engine_core.shutdown()
    return found


if __name__ == "__main__":
    main()
