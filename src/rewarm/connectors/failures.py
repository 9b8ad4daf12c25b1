"""What a connector could not restore or store, by cause: counted always, logged at most every few seconds.

A lost medium fails thousands of blocks a second; an engine's log shows what they were together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping

from rewarm.store.contract import GOOD_OUTCOMES, Outcome, Transfer

LOG_INTERVAL_S = 5.0
"""Seconds between two lines of the log."""
NOT_ADMITTED = f"save {Outcome.REFUSED_ADMISSION}"
"""Counted, but nothing to warn of: it is what was asked for."""


class Failures:
    """Counts of blocks by verb and cause, for one connector, from any thread."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._log = log
        self._lock = threading.Lock()
        self._unlogged: Counter[str] = Counter()
        self._logged_s = -LOG_INTERVAL_S

    def of(self, verb: str, transfer: Transfer) -> None:
        """Count the blocks of a transfer that has its verdict and did not do what `verb` asked."""
        self.note(Counter(f"{verb} {outcome}" for outcome in transfer.outcomes if outcome not in GOOD_OUTCOMES))

    def note(self, causes: Mapping[str, int]) -> None:
        """Count blocks by cause, and log what has come together since the last line."""
        with self._lock:
            self.counts.update(causes)
            self._unlogged.update({cause: count for cause, count in causes.items() if cause != NOT_ADMITTED})
            if not self._unlogged or time.monotonic() - self._logged_s < LOG_INTERVAL_S:
                return
            self._logged_s, unlogged, self._unlogged = time.monotonic(), self._unlogged, Counter()
        what = ", ".join(f"{count} of {cause}" for cause, count in sorted(unlogged.items()))
        self._log.warning("rewarm: blocks not restored or not stored, they will be computed: %s", what)
