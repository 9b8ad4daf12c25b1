"""A model built from a configuration, a long system prompt, and three questions: computed, kept, restored.

    make transformers-env
    .venv-transformers/bin/python examples/transformers_prefix/run.py [--directory DIR] [--model Qwen3|Llama|Gemma2]

No weights are downloaded: they are random, so the answers mean nothing, but they are the same every time. Run it twice
with one --directory: the second process restores the system prompt that the first one computed.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from rewarm.connectors.transformers import PrefixCache

SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 2048, 40, 8
SIZES = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def main() -> None:
    """Ask three questions in each way and compare the answers."""
    parser = argparse.ArgumentParser(description="Prefixes of a Transformers model in a Rewarm store.")
    parser.add_argument("--directory", help="where the pool is; default: a temporary directory")
    parser.add_argument("--model", default="Qwen3", help="Qwen3, Llama, Gemma2, ... (default: Qwen3)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = getattr(transformers, f"{arguments.model}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments.directory or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        answers = [ask(model, question) for question in range(3)]
        print("computed:", *(f"{seconds:.2f} s" for _, seconds in answers))
        for attempt in ("first time", "after a restart"):
            with PrefixCache(f"file://{directory}?capacity=1GiB", model) as cache:
                for question, (right, _) in enumerate(answers):
                    before = cache.stats().restored_tokens
                    answer, seconds = ask(model, question, cache)
                    restored = cache.stats().restored_tokens - before
                    same = "the same answer" if answer.equal(right) else "ANOTHER ANSWER"
                    print(f"{attempt}, question {question + 1}: {seconds:.2f} s, {restored} tokens restored, {same}")
                    cache.flush()


def ask(model: Any, question: int, cache: PrefixCache | None = None) -> tuple[Any, float]:
    """(tokens, seconds) of an answer to the system prompt and a question of its own."""
    system, own = random.Random(0), random.Random(question + 1)
    tokens = [system.randrange(3, 500) for _ in range(SYSTEM_TOKENS)]
    tokens += [own.randrange(3, 500) for _ in range(QUESTION_TOKENS)]
    ids = torch.tensor([tokens])
    start_s = time.monotonic()
    generate = model.generate if cache is None else cache.generate
    output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return output, time.monotonic() - start_s


if __name__ == "__main__":
    main()
