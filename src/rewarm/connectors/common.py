"""What every connector does alike: it checks its options, and counts and logs what storage did not give or take.

Knows no engine. A failure is counted always and logged in one place, at most once in a while: a lost medium fails
thousands of blocks a second.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rewarm.errors import ConfigError
from rewarm.store.contract import GOOD_OUTCOMES, Outcome

LOG_INTERVAL_S = 5.0
"""How often failures are logged at most."""


class Failures:
    """Blocks that were not restored or not kept, by cause. From any thread."""

    def __init__(self, log: logging.Logger) -> None:
        """Nothing failed yet; `log` is the connector's own."""
        self.counts: Counter[str] = Counter()
        """Since the start."""
        self._log = log
        self._lock = threading.Lock()
        self._unlogged: Counter[str] = Counter()
        self._logged_s = -LOG_INTERVAL_S

    def note(self, cause: str, blocks: int) -> None:
        """Count blocks that failed for one cause."""
        self._add(Counter({cause: blocks}))

    def note_outcomes(self, verb: str, outcomes: Iterable[Outcome | None]) -> None:
        """Count the outcomes of a transfer that are not good, each as "verb outcome"."""
        self._add(Counter(f"{verb} {outcome}" for outcome in outcomes if outcome not in GOOD_OUTCOMES))

    def _add(self, causes: Counter[str]) -> None:
        if not causes:
            return
        with self._lock:
            self.counts.update(causes)
            self._unlogged.update(causes)
            now_s = time.monotonic()
            if now_s - self._logged_s < LOG_INTERVAL_S:
                return
            self._logged_s, unlogged, self._unlogged = now_s, self._unlogged, Counter()
        what = ", ".join(f"{count} of {cause}" for cause, count in sorted(unlogged.items()))
        self._log.warning("rewarm: blocks not restored or not stored, they will be computed: %s", what)


def check_names(options: Mapping[str, object], known: Sequence[str], whose: str, others: Sequence[str] = ()) -> None:
    """Raise `ConfigError` for an option that is not known, and without a URL; `others` are allowed, not proposed."""
    for name in options:
        if name not in known and name not in others:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r} of {whose}; {hint}")
    if not options.get("url"):
        raise ConfigError(f'{whose} needs "url", for example "file:///mnt/nvme0/kv?capacity=2TiB"')


def version_of(distribution: str) -> str | None:
    """The version of a package in this environment, None without it. Imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
