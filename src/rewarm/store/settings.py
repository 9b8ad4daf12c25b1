"""What a URL may say about a file store, and the bounds that follow from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from rewarm.store.contract import SAVE_QUEUE_BYTES
from rewarm.store.devices.select import Choice

NETWORK_VISIBILITY_S = 60.0
"""Longest time that a network mount with default timeouts hides a new name (NFS: acdirmax)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a URL may say about a file store beside its directory."""

    access: Literal["private", "group"] | None = None
    device: str = "auto"
    poll_s: float = 1.0
    lease_s: float = 90.0
    log_keep_s: float = 600.0
    io_deadline_s: float = 30.0
    close_timeout_s: float = 30.0
    save_queue_bytes: int = SAVE_QUEUE_BYTES
    bounce: Literal["auto", "always"] = "auto"
    io: Literal["thread", "process"] = "thread"


def visibility_bound_s(choice: Choice, poll_s: float) -> float:
    """Seconds until what one handle published is a hit for another: a poll, and what a network mount adds."""
    return poll_s + (NETWORK_VISIBILITY_S if choice.network else 0.0)
