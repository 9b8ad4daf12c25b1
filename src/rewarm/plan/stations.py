"""Queues of the simulator: jobs that advance together, one by one, or shortest first. Work in any unit, time in s.

A station only keeps its own clock. It says when its next job ends if nothing changes (`next_end`), and the event loop
asks again after every change. Promises work conservation; does not know what a job is.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable


class Station(ABC):
    """A queue with a rate in units of work per second. `version` changes with every change of the queue: an end that
    was announced under another version is stale."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._at = 0.0
        self.version = 0

    def add(self, now: float, job: int, work: float) -> None:
        """A job with that much work arrives."""
        self._advance(now)
        self._push(job, work)
        self.version += 1

    def set_rate(self, now: float, rate: float) -> None:
        """From now on work is done at another rate."""
        self._advance(now)
        self._rate = rate
        self.version += 1

    def next_end(self, now: float) -> float:
        """When the next job ends if nothing changes; inf when there is none."""
        if not len(self):
            return math.inf
        self._advance(now)
        return now + max(self._left_s(), 0.0)

    def pop(self, now: float) -> int:
        """The job that ends now. Pre-condition: `now` is what `next_end` said."""
        self._advance(now)
        self.version += 1
        return self._take()

    def _advance(self, now: float) -> None:
        if now > self._at and len(self):
            self._work(now - self._at)
        self._at = now

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _push(self, job: int, work: float) -> None: ...

    @abstractmethod
    def _work(self, elapsed_s: float) -> None: ...

    @abstractmethod
    def _left_s(self) -> float: ...

    @abstractmethod
    def _take(self) -> int: ...


class Sharing(Station):
    """All jobs advance at one pace: processor sharing (`rate / n`), or another pace that depends on their number."""

    def __init__(self, rate: float, pace: Callable[[int], float] | None = None) -> None:
        super().__init__(rate)
        self._pace = pace
        self._done = 0.0
        self._ends: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def _speed(self) -> float:
        count = len(self._ends)
        return self._pace(count) if self._pace else self._rate / count

    def _push(self, job: int, work: float) -> None:
        if not self._ends:
            self._done = 0.0
        heapq.heappush(self._ends, (self._done + work, job))

    def _work(self, elapsed_s: float) -> None:
        self._done += elapsed_s * self._speed()

    def _left_s(self) -> float:
        return (self._ends[0][0] - self._done) / self._speed()

    def _take(self) -> int:
        end, job = heapq.heappop(self._ends)
        self._done = max(self._done, end)
        return job


class OneByOne(Station):
    """One job at a time at the full rate, in order of arrival."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self._jobs: deque[tuple[float, int]] = deque()
        self._head = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def _push(self, job: int, work: float) -> None:
        if not self._jobs:
            self._head = work
        self._jobs.append((work, job))

    def _work(self, elapsed_s: float) -> None:
        self._head -= elapsed_s * self._rate

    def _left_s(self) -> float:
        return self._head / self._rate

    def _take(self) -> int:
        job = self._jobs.popleft()[1]
        self._head = self._jobs[0][0] if self._jobs else 0.0
        return job


class ShortestFirst(Station):
    """One job at a time at the full rate: the one with the least work left; an arrival with less takes over."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self._jobs: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def _push(self, job: int, work: float) -> None:
        heapq.heappush(self._jobs, (work, job))

    def _work(self, elapsed_s: float) -> None:
        # The head only gets shorter, so it stays the head and the heap stays a heap.
        left, job = self._jobs[0]
        self._jobs[0] = (left - elapsed_s * self._rate, job)

    def _left_s(self) -> float:
        return self._jobs[0][0] / self._rate

    def _take(self) -> int:
        return heapq.heappop(self._jobs)[1]


ORDERS: dict[str, Callable[[float], Station]] = {
    "together": Sharing,
    "arrival": OneByOne,
    "shortest": ShortestFirst,
}
"""The station of every restore order of a plan."""
