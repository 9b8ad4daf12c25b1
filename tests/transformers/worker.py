"""Runs in the environment of Transformers: models built from a configuration, and prefix caches over them."""

from __future__ import annotations

import sys
from typing import Any

import rewarm.connectors.transformers

EAGER = sorted(name for name in ("torch", "transformers") if name in sys.modules)

import torch  # noqa: E402
import transformers  # noqa: E402
from tests.remote import serve  # noqa: E402

SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
"""Wide initial values, so that tokens differ from one another."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 40, "query_pre_attn_scalar": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 64}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "qk_nope_head_dim": 32,
            "v_head_dim": 48,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 2,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {}),
    "t5": ("T5Config", {"d_model": 64, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 32}),
}


class Worker:
    """Models and caches by name."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # such small models gain nothing from more, and lose much beside other work
        self.models: dict[str, Any] = {}
        self.caches: dict[str, Any] = {}

    def eager(self) -> list[str]:
        """Engine packages that importing the connector imported."""
        return EAGER

    def make(self, name: str, kind: str, seed: int = 0, dtype: str = "float32", **sizes: Any) -> None:
        """A model with random weights."""
        config_name, more = KINDS[kind]
        attention = sizes.pop("attention", "sdpa")
        config = getattr(transformers, config_name)(**{**SIZES, **more, **sizes})
        auto = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
        torch.manual_seed(seed)
        self.models[name] = auto.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention).eval()

    def touch(self, name: str) -> None:
        """Change the weights in place, as a step of training does."""
        with torch.no_grad():
            next(self.models[name].parameters()).mul_(1.5)

    def train(self, name: str, on: bool) -> None:
        """Training mode."""
        self.models[name].train(on)

    def plain(self, name: str, ids: list[list[int]], mask: list[list[int]] | None = None, **options: Any) -> Any:
        """What the model answers without Rewarm."""
        inputs, marks = _tensors(ids, mask)
        marks = torch.ones_like(inputs) if marks is None else marks
        return self.models[name].generate(inputs, attention_mask=marks, **_greedy(options)).tolist()

    def open(self, cache: str, name: str, url: str, **options: Any) -> str:
        """A prefix cache over a model; its namespace."""
        options.setdefault("block_tokens", 32)
        self.caches[cache] = rewarm.connectors.transformers.PrefixCache(url, self.models[name], **options)
        return str(self.caches[cache].namespace.digest.hex())

    def generate(self, cache: str, ids: list[list[int]], mask: list[list[int]] | None = None, **options: Any) -> Any:
        """What the model answers with Rewarm, and how many tokens were restored."""
        inputs, marks = _tensors(ids, mask)
        before = self.caches[cache].stats().restored_tokens
        tokens = self.caches[cache].generate(inputs, attention_mask=marks, **_greedy(options)).tolist()
        return {"tokens": tokens, "restored": self.caches[cache].stats().restored_tokens - before}

    def embeds(self, cache: str) -> None:
        """An input beside tokens."""
        self.caches[cache].generate(torch.ones((1, 4), dtype=torch.long), inputs_embeds=torch.zeros(1, 4, 128))

    def halves(self, cache: str, ids: list[list[int]]) -> Any:
        """Restore and keep by hand around a forward pass: tokens restored, blocks queued."""
        inputs, _ = _tensors(ids, None)
        past = self.caches[cache].restore(inputs)
        found = past.get_seq_length()
        with torch.no_grad():
            self.caches[cache]._model(inputs[:, found:], past_key_values=past, use_cache=True)
        return [found, self.caches[cache].keep(inputs, past)]

    def stats(self, cache: str) -> Any:
        """Counters."""
        self.caches[cache].flush()
        found = self.caches[cache].stats()
        return {"kept": found.kept_blocks, "lost": found.lost, "hits": found.store.hits, "read": found.store.bytes_read}

    def close(self, cache: str) -> None:
        """Close a cache."""
        self.caches.pop(cache).close()


def _tensors(ids: list[list[int]], mask: list[list[int]] | None) -> tuple[Any, Any]:
    return torch.tensor(ids), None if mask is None else torch.tensor(mask)


def _greedy(options: dict[str, Any]) -> dict[str, Any]:
    return {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}


if __name__ == "__main__":
    serve(Worker())
