"""Which request a medium serves next: shortest remaining first, bounded by ageing. Pure: no clock, no thread, no I/O.

It promises that a request is overtaken by at most `ageing` times its own bytes: so much of what came after it may be
served while it waits. What came before it is not counted, because no order can promise how long a backlog takes.
With `ageing` 0 nobody is ever overtaken: that is arrival order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from rewarm.errors import ConfigError

AGEING = 8.0
"""Times its own size that a request may be overtaken by. On the sizes of a real trace the order is then nearly that
without a bound, and a request of 8 GB waits at most for 64 GB of later ones."""


class Sized(Protocol):
    """What can be ordered."""

    @property
    def remaining_bytes(self) -> int:
        """Bytes of the whole request that nobody has begun to serve."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of it on this medium that nobody has begun to serve."""

    @property
    def size_bytes(self) -> int:
        """Bytes of it on this medium when it came."""


Waiting = TypeVar("Waiting", bound=Sized)


class RestoreOrder(Generic[Waiting]):
    """The requests that wait for one medium, in the order they came. For one thread."""

    def __init__(self, ageing: float = AGEING) -> None:
        if not 0 <= ageing < math.inf:
            raise ConfigError(f"ageing must be 0 (arrival order) or a positive number, got {ageing}")
        self._ageing = ageing
        self._overtaken: dict[Waiting, int] = {}

    def __len__(self) -> int:
        return len(self._overtaken)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._overtaken))

    def add(self, request: Waiting) -> None:
        """A request has come."""
        self._overtaken[request] = 0

    def remove(self, request: Waiting) -> None:
        """A request waits no more; harmless when it did not."""
        self._overtaken.pop(request, None)

    def next(self, slice_bytes: int) -> Waiting | None:
        """Whom to serve next with a slice of at most so many bytes; None when nobody waits.

        The first to have come whose bound another slice would break; where there is none, the one with the least left.
        """
        chosen: Waiting | None = None
        for request, overtaken_bytes in self._overtaken.items():
            if overtaken_bytes + slice_bytes > self._ageing * request.size_bytes:
                return request
            if chosen is None or request.remaining_bytes < chosen.remaining_bytes:
                chosen = request
        return chosen

    def served(self, request: Waiting, count: int) -> None:
        """So many bytes of a request are being served: all that came before it have been overtaken by them."""
        for earlier in self._overtaken:
            if earlier is request:
                return
            self._overtaken[earlier] += count

    def queue(self) -> list[tuple[float, int]]:
        """Per waiting request: from how many bytes on a new request would be served after it, and its unsent bytes.

        A new request of as many bytes as it has left, or of more than it may still be overtaken by. From any thread.
        """
        return [
            (min(request.remaining_bytes, self._ageing * request.size_bytes - overtaken_bytes), request.unsent_bytes)
            for request, overtaken_bytes in list(self._overtaken.items())
        ]
