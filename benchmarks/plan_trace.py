"""`rewarm trace` on 10 million block references: wall time and peak memory of the whole command. Target: 60 s, 2 GB.

    python benchmarks/plan_trace.py [--references 10000000] [--sample 0.1]

The trace is made here, in Mooncake's format: conversations that grow turn by turn behind shared system prompts, about
24 blocks a prompt, the same for every run. Its exact hit curve is computed from the file by the command itself.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROMPT_BLOCKS = 24
SYSTEM_PROMPTS = 16
CONTINUE = 0.6
"""Share of requests that continue an older conversation; the others start one."""


def make_trace(path: Path, references: int) -> int:
    """Write a trace of at least so many references; gives the number of requests."""
    rng = np.random.default_rng(0)
    conversations: list[list[int]] = []
    next_block, written, requests, now_ms = SYSTEM_PROMPTS, 0, 0, 0
    with path.open("w") as out:
        while written < references:
            draws = rng.random(4)
            now_ms += int(draws[0] * 20)
            grown = 1 + int(draws[1] * PROMPT_BLOCKS)
            if conversations and draws[2] < CONTINUE:
                # Recent conversations are more likely to go on, old ones less and less.
                place = int(len(conversations) * (1 - draws[3] ** 4))
                blocks = conversations[min(place, len(conversations) - 1)]
            else:
                blocks = [int(draws[3] * SYSTEM_PROMPTS)]
                conversations.append(blocks)
            blocks.extend(range(next_block, next_block + grown))
            next_block += grown
            row = {"timestamp": now_ms, "input_length": 512 * len(blocks), "output_length": 100, "hash_ids": blocks}
            out.write(json.dumps(row) + "\n")
            written += len(blocks)
            requests += 1
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--references", type=int, default=10_000_000)
    parser.add_argument("--sample", default="1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        requests = make_trace(path, options.references)
        size = path.stat().st_size
        command = [sys.executable, "-m", "rewarm", "trace", str(path), "--json", "-q", "--sample", options.sample]
        started = time.monotonic()
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, env=os.environ).stdout)
        seconds = time.monotonic() - started
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"{answer['blocks']:,} references of {answer['distinct_blocks']:,} blocks, {requests:,} requests, "
          f"{size / 1e6:.0f} MB of JSON")  # fmt: skip
    print(f"token hit rate {answer['infinite_cache']['token_hit_rate']:.1%} without limit")
    print(f"{seconds:.1f} s (target 60), peak memory {peak / 1e9:.2f} GB (target 2)")


if __name__ == "__main__":
    main()
