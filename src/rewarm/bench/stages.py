"""How a run tells how far it is: a stage has a label and bytes to move, and whoever calls decides how to show it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Progress(Protocol):
    """What a stage tells while it goes on."""

    def advance(self, amount: float = 1) -> None:
        """Add finished work, in bytes."""


Stages = Callable[[str, float], AbstractContextManager[Progress]]
"""Called with a label and the bytes of a stage when it begins; the context ends with it."""
