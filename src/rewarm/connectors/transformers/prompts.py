"""Prompts as rows of tokens, and the keys of their blocks: a chain of digests, so a key stands for the whole prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rewarm.errors import MisuseError

ROOT = hashlib.sha256(b"rewarm transformers chain 1").digest()
UNSUPPORTED = ("prefill_chunk_size", "prompt_lookup_num_tokens", "assistant_model", "custom_generate")
PLAIN = {"use_cache": True, "num_beams": 1, "num_return_sequences": 1, "cache_implementation": "dynamic"}
"""Options of `generate` that handle its cache in another way, and the value with which they do not."""


class Row(msgspec.Struct, frozen=True, eq=False):
    """One row of a batch: columns of padding on its left, then its tokens."""

    padding: int
    tokens: npt.NDArray[np.int64]

    def keys(self, block_tokens: int) -> list[bytes]:
        """The key of every whole block, 32 bytes each; it stands for the block and all tokens before it."""
        whole = len(self.tokens) // block_tokens
        digest, keys = ROOT, []
        for block in self.tokens[: whole * block_tokens].astype("<i8").reshape(whole, block_tokens):
            digest = hashlib.sha256(digest + block.tobytes()).digest()
            keys.append(digest)
        return keys


def rows_of(input_ids: Any, attention_mask: Any, pad_token: int | None = None, *, answered: bool = False) -> list[Row]:
    """The rows of a batch, from tensors of shape (rows, columns); without a mask no column is padding, and a mask may
    end before an answer (`answered`).

    Raises `MisuseError` for padding anywhere but on the left, and for padding that no mask marks.
    """
    if getattr(input_ids, "ndim", 0) != 2 or 0 in input_ids.shape or input_ids.is_floating_point():
        raise MisuseError("input_ids is a tensor of token numbers of shape (rows, columns), with a token at least")
    ids = input_ids.detach().cpu().numpy().astype(np.int64)
    if attention_mask is None:
        if pad_token is not None and bool((ids == pad_token).any()):
            raise MisuseError(f"input_ids holds the padding token {pad_token}: give attention_mask as well")
        return [Row(0, row) for row in ids]
    mask = attention_mask.detach().cpu().numpy()
    if mask.shape != ids.shape and not (answered and mask.shape < ids.shape and len(mask) == len(ids)):
        raise MisuseError(f"attention_mask has shape {mask.shape}, input_ids {ids.shape}; it must be the same")
    padding = (mask == 0).sum(axis=1)
    if not np.array_equal(mask != 0, np.arange(mask.shape[1]) >= padding[:, None]) or (padding == mask.shape[1]).any():
        raise MisuseError('padding must stand on the left of each row (tokenizer.padding_side = "left")')
    return [Row(int(left), row[left:]) for left, row in zip(padding, ids, strict=True)]


def check_options(options: Mapping[str, Any], config: Any, known: set[str]) -> None:
    """Raise `MisuseError` for an option of `generate` that changes the KV, or handles the cache in its own way.

    `config` is the generation configuration in force, `known` are the options that change neither.
    """
    for name in (*UNSUPPORTED, "negative_prompt_ids", *PLAIN):
        value = options.get(name, getattr(config, name, None))
        if value not in (None, PLAIN.get(name)):
            raise MisuseError(f"{name}={value!r} handles the cache in its own way: call the model's own generate")
    for name in options:
        if name == "past_key_values":
            raise MisuseError("past_key_values is what is restored here: leave it out")
        if name not in known and not hasattr(config, name):
            raise MisuseError(f"{name} may change the KV of the same tokens: call the model's own generate")
