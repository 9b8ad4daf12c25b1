"""Which blocks of a save go to flash: all, those seen for the second time, or those of long contexts. Counts the price.

Flash wears by writes, and most contexts never come back. What is not admitted stays in DRAM for as long as there is
room. Two counters say what a policy does: bytes it has kept off flash, and blocks that had to be computed again because
of it: an engine saves a block again only when it was asked for and was not there. Pure, but for a lock.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Sequence
from typing import Literal

import msgspec

from rewarm.errors import ConfigError

REMEMBERED_KEYS_MAX = 1 << 18
"""Refused keys that are known again, about 40 MB of them; above it the oldest count as never seen."""


class Policy(msgspec.Struct, frozen=True):
    """What is admitted; `blocks` is the shortest save that `long` takes."""

    kind: Literal["all", "second-sight", "long"] = "all"
    blocks: int = 0


def parse_admission(text: str, block_tokens: int | None = None) -> Policy:
    """`all`, `second-sight`, or `min-tokens=N` where a block holds `block_tokens`. Raises `ConfigError`."""
    if text == "all":
        return Policy("all")
    if text == "second-sight":
        return Policy("second-sight")
    match = re.fullmatch(r"min-tokens=([1-9][0-9]{0,8})", text)
    if match is None:
        words = ("all", "second-sight", "min-tokens=N")
        near = difflib.get_close_matches(text, words, n=1)
        raise ConfigError(f"admission {text!r} is not known; " + (f"did you mean {near[0]!r}?" if near else str(words)))
    if block_tokens is None:
        raise ConfigError(f"admission {text} needs block_tokens: how many tokens one block holds")
    return Policy("long", -(-int(match[1]) // block_tokens))


class Admission:
    """A policy, the keys that it has refused, and its counters. From any thread."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._refused: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self.saved_bytes = 0
        self.lost_blocks = 0

    def admit(self, keys: Sequence[bytes], lengths: Sequence[int], positions: list[int]) -> list[int]:
        """Which of these positions of a save go to flash. `keys` is the whole save: its length is its context's."""
        if self._policy.kind == "all":
            return positions
        admitted = []
        long = self._policy.kind == "long" and len(keys) >= self._policy.blocks
        with self._lock:
            for position in positions:
                key = keys[position]
                known = key in self._refused
                self.lost_blocks += known
                if long or (known and self._policy.kind == "second-sight"):
                    self._forget(key)
                    admitted.append(position)
                elif not known:
                    self._remember(key, lengths[position])
        return admitted

    def seen_again(self, key: bytes) -> bool:
        """A block that only DRAM held was asked for: True when it goes to flash now."""
        if self._policy.kind != "second-sight":
            return False
        with self._lock:
            self._forget(key)
        return True

    def _remember(self, key: bytes, length: int) -> None:
        self._refused[key] = length
        self.saved_bytes += length
        if len(self._refused) > REMEMBERED_KEYS_MAX:
            del self._refused[next(iter(self._refused))]

    def _forget(self, key: bytes) -> None:
        self.saved_bytes -= self._refused.pop(key, 0)
