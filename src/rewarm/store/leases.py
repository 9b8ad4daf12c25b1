"""Who lives and who is dead, and taking over what the dead have left.

On a local file system a writer whose lock is free is dead: its process is gone. A process that is stopped keeps its
lock, and over a network locks tell nothing: there a writer is dead once its log has not changed for its lease, by this
process's own monotonic clock. Either way it is adopted before anything is done to files that it may still append to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rewarm.store.pool import Pool
from rewarm.store.tailing import Tailer
from rewarm.store.writer import writer_is_dead


class Leases:
    """Watches the other writers of a pool."""

    def __init__(self, pool: Pool, tailer: Tailer, lease_s: float, *, local: bool) -> None:
        self._pool = pool
        self._tailer = tailer
        self._lease_s = lease_s
        self.local = local

    def is_dead(self, writer: str, logs: Sequence[str]) -> bool:
        """True when nobody may append to a writer's files any more; `logs` are the names of its logs, in order.

        On a local file system a directory without a log is nobody's, too: it cannot be found.
        """
        with contextlib.suppress(OSError):
            return self._is_gone(writer, logs) or self._tailer.silent(writer, self._lease_s)
        return False

    def adopt(self, writer: str, logs: Sequence[str]) -> bool:
        """Take over a dead writer; False when it lives, or cannot be adopted now."""
        with contextlib.suppress(OSError):
            return self._tailer.adopt(writer, None if self._is_gone(writer, logs) else self._lease_s)
        return False

    def _is_gone(self, writer: str, logs: Sequence[str]) -> bool:
        # The lock on the first log is held as long as the process lives: a later one is locked before that is let go.
        return self.local and (not logs or writer_is_dead(self._pool, writer, logs[0]))
