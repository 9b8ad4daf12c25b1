"""A fleet of 8 nodes, one hour of trace for each, three tiers: time to place all blocks and simulate all requests.
Target: 60 s.

    python benchmarks/plan_fleet.py [--nodes 8]

The trace is the conversation trace of the Mooncake project (tests/plan/data/NOTICE), a copy with blocks of its own for
every node; tiers are DRAM and two drives in every node and an array of eight drives on two ports.
"""

from __future__ import annotations

import argparse
import gzip
import resource
import time
from pathlib import Path

from rewarm.geometry import load_model
from rewarm.plan import TraceData, parse_plan
from rewarm.plan.assess import prepare, run
from rewarm.plan.cost import costs_of
from rewarm.plan.media import candidates_of
from rewarm.plan.traceload import TraceLoad
from rewarm.workload.requests import RequestsBuilder, Row

DATA = Path(__file__).resolve().parents[1] / "tests" / "plan" / "data" / "conversation.csv.gz"
BLOCK_TOKENS = 512
PLAN = """
model = "Llama-3.3-70B"
stacks = [["local", "array"]]
[engine]
gpu = "H100"
gpus = 8
fixed_time = "50ms"
[[medium]]
name = "local"
drives = 2
drive_read = "6.9GB/s"
capacity = "2TB"
[[medium]]
name = "array"
shared = true
drives = 8
drive_read = "6.9GB/s"
link = "100Gb/s"
ports = 2
capacity = "15.36TB"
[fleet]
nodes = {nodes}
tp = 8
migrate = 0.1
dram = "512GiB"
[workload]
shape = "trace"
trace = "conversation"
"""


def read_trace() -> TraceData:
    """The trace as the tests encode it."""
    builder, now_ms = RequestsBuilder(BLOCK_TOKENS), 0
    with gzip.open(DATA, "rt") as lines:
        for number, line in enumerate(lines):
            elapsed, tokens, output, runs = line.rstrip("\n").split(",")
            now_ms += int(elapsed)
            blocks: list[int] = []
            for piece in runs.split():
                first, _, more = piece.partition("+")
                blocks.extend(range(int(first), int(first) + int(more or 0) + 1))
            builder.add(Row(str(number), now_ms / 1e3, int(tokens), int(output), blocks))
    return TraceData(builder.take(), BLOCK_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate a fleet under a trace.")
    parser.add_argument("--nodes", type=int, default=8)
    options = parser.parse_args()
    spec = parse_plan(PLAN.format(nodes=options.nodes))
    trace = read_trace()
    costs = costs_of(spec, load_model(spec.model), int(trace.requests.input_tokens.mean()))
    tiers = candidates_of(spec)[-1]
    started = time.monotonic()
    load = TraceLoad(spec, costs, trace)
    ready = prepare(spec, costs, load, tiers, load.points[0])
    placed = time.monotonic()
    cell = run(spec, costs, ready).cell
    ended = time.monotonic()
    requests = load.routed.requests
    span_min = float(requests.arrival_s[-1]) / 60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{options.nodes} nodes, {span_min:.0f} minutes, {len(requests):,} requests, {len(requests.blocks):,} blocks")
    print(f"hits {cell.hit_tokens_share:.1%} of tokens, TTFT p50 {cell.ttft_s.p50:.2f} s, p90 {cell.ttft_s.p90:.2f} s")
    print(f"placed in {placed - started:.1f} s, simulated in {ended - placed:.1f} s, "
          f"{ended - started:.1f} s together (target 60), peak memory {peak / 1e9:.2f} GB")  # fmt: skip


if __name__ == "__main__":
    main()
