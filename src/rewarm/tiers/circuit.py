"""What is known of a drive's health and speed: circuits that open when it fails, and a meter. Pure: clocks are given.

An open circuit has a reason, which `stats` shows, and a time from which one trial may close it again.
"""

from __future__ import annotations

RETRY_S_MIN = 1.0
RETRY_S_MAX = 60.0
"""Pause before a failed drive is tried again, doubled with every failure in a row up to the longest."""

MEASURE_BYTES = 16 << 20
MEASURE_S = 0.25
"""A speed is taken over so many bytes and busy seconds: fewer bytes say more about latency than about bandwidth, and in
less time a medium that is limited in turns (a throttled volume, a shared port) looks as fast as its bursts."""

PERIOD_BYTES = 4 << 20
"""Busy periods that moved less do not count: one small read never fills a drive."""

MEASURE_SHARE = 0.3
"""Weight of a new reading against all earlier ones."""


class Circuit:
    """Closed while a drive works; open, with a reason, while it is avoided."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._retry_at_s = 0.0
        self._pause_s = 0.0

    def fail(self, reason: str, now_s: float) -> bool:
        """Open, or stay open for twice as long; True when it was closed."""
        opened = self.reason is None
        self.reason = reason
        self._pause_s = min(max(2 * self._pause_s, RETRY_S_MIN), RETRY_S_MAX)
        self._retry_at_s = now_s + self._pause_s
        return opened

    def succeed(self) -> bool:
        """Close; True when it was open."""
        closed = self.reason is not None
        self.reason, self._pause_s = None, 0.0
        return closed

    def due(self, now_s: float) -> bool:
        """True when it is open and a trial may be made."""
        return self.reason is not None and now_s >= self._retry_at_s

    def allows(self, now_s: float) -> bool:
        """True when it is closed, or a trial may be made."""
        return self.reason is None or now_s >= self._retry_at_s


class Meter:
    """Read bandwidth of a drive while it has something to do, bytes/s."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._since_s = 0.0
        self._period_bytes = 0
        self._bytes = 0
        self._busy_s = 0.0

    def begin(self, now_s: float) -> None:
        """The drive was idle and has something to do."""
        self._since_s = now_s
        self._period_bytes = 0

    def moved(self, count: int, now_s: float, *, idle: bool) -> None:
        """So many bytes have arrived; `idle` when they were the last."""
        self._period_bytes += count
        if self._period_bytes < PERIOD_BYTES:
            return
        self._bytes += self._period_bytes
        self._busy_s += now_s - self._since_s
        if not idle:
            # The period goes on, and has proven to be one that counts.
            self._since_s, self._period_bytes = now_s, 0
        if self._bytes >= MEASURE_BYTES and self._busy_s >= MEASURE_S:
            reading = self._bytes / self._busy_s
            before = reading if self.bytes_per_s is None else self.bytes_per_s
            self.bytes_per_s = before + MEASURE_SHARE * (reading - before)
            self._bytes, self._busy_s = 0, 0.0
