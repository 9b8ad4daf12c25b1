"""Tiny models with random weights, made where the engine is: no download, another seed is another fine-tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.25,
}
"""Two KV heads, so that two ranks split them; wide initial values, so that tokens differ from one another."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 2,
    "first_k_dense_replace": 3,
}
"""The CPU backend takes latents of 512 + 64 elements only. No layer has experts."""


def make(path: str, kind: str = "qwen3", seed: int = 0, **sizes: Any) -> None:
    """Write a model of one kind (qwen3, gemma2: every other layer slides, deepseek_v2: MLA) to a directory."""
    import torch
    import transformers

    classes = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "gemma2": (
            transformers.Gemma2Config,
            transformers.Gemma2ForCausalLM,
            {"sliding_window": 128, "num_hidden_layers": 4, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
        ),
        "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM, LATENT),
    }
    config_class, model_class, more = classes[kind]
    torch.manual_seed(seed)
    config = config_class(**{**SIZES, **more, **sizes}, torch_dtype="float32")
    model_class(config).to(torch.float32).save_pretrained(path, safe_serialization=True)
    _write_tokenizer(Path(path))


def _write_tokenizer(path: Path) -> None:
    """A tokenizer of single bytes: every text is as many tokens as it has bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<bos>", "<eos>", *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": 1 << 20,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
