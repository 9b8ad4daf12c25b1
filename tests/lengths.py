"""How long tests go on that repeat one thing with other dice: shortly for every change, at length when asked.

`make test-long` sets REWARM_LONG: the same tests, with as many repetitions as were run once before a release.
"""

from __future__ import annotations

import os

LONG = os.environ.get("REWARM_LONG") == "1"


def repeated(shortly: int, at_length: int) -> int:
    """How often, or for how many seconds."""
    return at_length if LONG else shortly
