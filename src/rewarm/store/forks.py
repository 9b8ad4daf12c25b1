"""Tells that this process was forked from the one that opened a store, without a system call for each look-up.

A forked child has none of the store's threads and must not use its devices: every handle compares `count` with what it
was when it was opened.
"""

from __future__ import annotations

import os

count = 0
"""Forks between this process and the one that imported the package first."""


def _forked() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_forked)
