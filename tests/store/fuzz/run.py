"""Fuzzes the parsers: `python -m tests.store.fuzz.run [INPUTS] [SEED]`, or `make fuzz`.

Inputs that take a new way through a parser become the start of others, and with KEEP in the environment part of the
corpus. An input on which a parser fails is kept always, and ends the run.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path

from tests.store.fuzz.mutations import mutate, seeds
from tests.store.fuzz.parsers import PARSERS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = 1_000_000


def corpus() -> dict[str, list[bytes]]:
    """Inputs kept from earlier runs, by parser."""
    kept: dict[str, list[bytes]] = {parser: [] for parser in PARSERS}
    for path in sorted(CORPUS.iterdir()):
        kept[path.name.split("-")[0]].append(path.read_bytes())
    return kept


def keep(parser: str, data: bytes) -> Path:
    """Add an input to the corpus."""
    path = CORPUS / f"{parser}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def fuzz(inputs: int, seed: int, *, keeping: bool) -> dict[str, int]:
    """Try so many inputs; returns how many ways each parser was taken through. Raises what a parser raises."""
    dice = random.Random(seed)
    pools = {parser: good + corpus()[parser] for parser, good in seeds().items()}
    seen = {parser: {PARSERS[parser](data) for data in inputs} for parser, inputs in pools.items()}
    names = list(PARSERS)
    for number in range(inputs):
        parser = names[number % len(names)]
        data = mutate(parser, dice.choice(pools[parser]), dice)
        try:
            feature = PARSERS[parser](data)
        except BaseException:
            sys.stderr.write(f"{parser} failed on input {number} of seed {seed}: {keep(parser, data)}\n")
            raise
        if feature not in seen[parser]:
            seen[parser].add(feature)
            pools[parser].append(data)
            if keeping:
                keep(parser, data)
    return {parser: len(features) for parser, features in seen.items()}


def main() -> None:
    """Run and say what was tried."""
    inputs, seed = (*map(int, sys.argv[1:]), *(INPUTS, 1)[len(sys.argv) - 1 :])
    start = time.monotonic()
    ways = fuzz(inputs, seed, keeping=bool(os.environ.get("KEEP")))
    took = time.monotonic() - start
    sys.stdout.write(f"{inputs:,} inputs, seed {seed}, {took:.0f} s, no failure; ways through each parser: {ways}\n")


if __name__ == "__main__":
    main()
