"""Time to the first token in Transformers: a 2,048-token prefix restored by Rewarm, beside computing it.

    .venv-transformers/bin/python benchmarks/transformers_restore.py [--rounds 5] [--directory DIR]

Runs in the environment of `make transformers-env`. Every figure comes from a process of its own, forked from one that
has imported torch, so nothing is left of the prompt but the pool; its pages are dropped from the page cache before each
round (the store reads past it where the medium allows). Rounds are interleaved: computed, restored, and again. Models
have random weights, 8 layers of 512 (16 KiB of KV a token in float32), and run on the CPU: computing is slower, and the
ratio larger, than on a GPU. A prompt is the prefix and 32 tokens of its own; the first token is that of `generate`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _child import in_child
from _media import drop_pages

PREFIX_TOKENS = 2048
OWN_TOKENS = 32
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS = ("Qwen3", "Llama")


def main() -> None:
    """Keep the prefix once, run the rounds, print medians."""
    parser = argparse.ArgumentParser(description="Time to the first token in Transformers, restored and computed.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the pool is made; default: a temporary directory")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch  # noqa: F401  # once, for all processes
    import transformers  # noqa: F401

    folder = Path(tempfile.mkdtemp(prefix="rewarm-transformers-", dir=arguments.directory))
    try:
        for model in MODELS:
            measure(folder, model, arguments.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, model: str, rounds: int) -> None:
    """Keep, then take turns."""
    pool = folder / model
    pool.mkdir()
    kept = in_child(folder, lambda: restored(pool, model, seed=0))
    assert kept["restored"] == 0
    seconds: dict[str, list[float]] = {"computed": [], "restored": []}
    for turn in range(1, rounds + 1):
        drop_pages(pool)
        slow = in_child(folder, lambda turn=turn: computed(model, turn))  # type: ignore[misc]
        fast = in_child(folder, lambda turn=turn: restored(pool, model, turn))  # type: ignore[misc]
        assert fast["restored"] == PREFIX_TOKENS, fast
        assert fast["tokens"] == slow["tokens"], "the answers differ"
        seconds["computed"].append(slow["seconds"])
        seconds["restored"].append(fast["seconds"])
    ratios = [slow / fast for slow, fast in zip(seconds["computed"], seconds["restored"], strict=True)]
    print(f"{model}, {PREFIX_TOKENS} + {OWN_TOKENS} tokens, {rounds} interleaved rounds, through {fast['device']}")
    for name, times in seconds.items():
        print(f"  {name}: {statistics.median(times):.3f} s to the first token ({min(times):.3f} .. {max(times):.3f})")
    print(f"  computed / restored: {statistics.median(ratios):.1f} ({min(ratios):.1f} .. {max(ratios):.1f})")


def make_model(name: str) -> Any:
    """A model with the same random weights each time."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def prompt(turn: int) -> Any:
    """The prefix that all turns share, and tokens of this turn's own."""
    import torch

    shared, own = random.Random(0), random.Random(turn + 1)
    tokens = [shared.randrange(3, 500) for _ in range(PREFIX_TOKENS)] + [
        own.randrange(3, 500) for _ in range(OWN_TOKENS)
    ]
    return torch.tensor([tokens])


def computed(model: str, turn: int) -> dict[str, Any]:
    """The first token without Rewarm."""
    import torch

    made, ids = make_model(model), prompt(turn)
    made.generate(ids[:, :64], attention_mask=torch.ones(1, 64), max_new_tokens=1, do_sample=False)
    start_s = time.monotonic()
    output = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    return {"seconds": time.monotonic() - start_s, "tokens": output[0, -1:].tolist()}


def restored(pool: Path, model: str, seed: int) -> dict[str, Any]:
    """The first token with Rewarm, after a restart."""
    import torch

    from rewarm.connectors.transformers import PrefixCache

    made, ids = make_model(model), prompt(seed)
    made.generate(ids[:, :64], attention_mask=torch.ones(1, 64), max_new_tokens=1, do_sample=False)
    with PrefixCache(f"file://{pool}?capacity=1GiB", made) as cache:
        start_s = time.monotonic()
        output = cache.generate(ids, max_new_tokens=1, do_sample=False)
        took_s = time.monotonic() - start_s
        found = cache.stats()
    return {
        "seconds": took_s,
        "tokens": output[0, -1:].tolist(),
        "restored": found.restored_tokens,
        "device": found.store.device,
    }


if __name__ == "__main__":
    main()
