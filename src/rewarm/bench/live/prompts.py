"""Prompts of a job: text that a server cannot have seen, of about as many tokens as asked for, distinct from its start.

Everything follows from the seed and a number, so that a later run asks for the same prefixes. How many tokens a word
is depends on the server's tokenizer, so it is measured: `Tokenizer` holds what two short prompts showed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rewarm.workload.job import Server

FRESH = 1 << 32
"""Prompts from this number on are no sessions: they are computed anew, to overflow a cache, or to disturb."""
SAMPLE_WORDS = (16, 256)
"""Lengths of the two prompts that show how many tokens a word is."""
_SYLLABLES = [f"{consonant}{vowel}" for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
_WORDS = np.array([f"{first}{second}" for first in _SYLLABLES for second in _SYLLABLES])


@dataclass(frozen=True)
class Tokenizer:
    """Tokens of a prompt of n words: `fixed + n * per_word`, as the server counted two of them."""

    fixed: float
    per_word: float
    measured: bool

    @classmethod
    def of(cls, words: Sequence[int], tokens: Sequence[int | None]) -> Tokenizer:
        """From two lengths and what the server counted; unmeasured, one token each, where it does not count."""
        few, many = tokens
        if few is None or many is None or many <= few:
            return cls(0.0, 1.0, measured=False)
        per_word = (many - few) / (words[1] - words[0])
        return cls(few - words[0] * per_word, per_word, measured=True)

    def words(self, tokens: int, *, start: bool = True) -> int:
        """Words of a text of so many tokens; `start`: what the server puts around it counts, too."""
        return max(1, round((tokens - (self.fixed if start else 0.0)) / self.per_word))


def text(seed: int, number: int, words: int) -> str:
    """The text of a number. A shorter one is the start of a longer one; two numbers differ from the first words on."""
    chosen = np.random.default_rng((seed, number)).integers(len(_WORDS), size=words)
    return " ".join(_WORDS[chosen].tolist())


def request_body(server: Server, model: str, prompt: str, output_tokens: int) -> bytes:
    """The body of a streamed request for `output_tokens` at most; `server.body` is added, and wins."""
    table: dict[str, Any] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if server.api == "chat":
        table["messages"] = [{"role": "user", "content": prompt}]
    else:
        table["prompt"] = prompt
    return msgspec.json.encode(table | server.body)
