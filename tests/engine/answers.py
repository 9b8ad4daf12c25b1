"""When two answers of an engine are the same."""

from __future__ import annotations

from typing import Any

LOGPROB_ERROR = 2e-5
"""Whole prompts and their last blocks are multiplied in other shapes: the last bits of float32 differ."""


def same(answer: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Token for token, and log-probabilities within the rounding of float32."""
    pairs = [
        (a, b)
        for mine, right in zip(answer["logprobs"], reference["logprobs"], strict=True)
        for a, b in zip(mine, right, strict=True)
    ]
    return answer["tokens"] == reference["tokens"] and all(abs(a - b) <= LOGPROB_ERROR for a, b in pairs)
