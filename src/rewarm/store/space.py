"""Who has which part of a region: first fit, neighbours merged. Not locked."""

from __future__ import annotations

from bisect import bisect_left, insort


class Space:
    """The free parts of `size` bytes. Bytes keep the alignment of what is taken."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]

    def take(self, size: int) -> int | None:
        """Offset of `size` bytes; None where no part is large enough."""
        for number, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[number : number + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Take back what `take` has given."""
        at = bisect_left(self._free, (offset, 0))
        if at < len(self._free) and self._free[at][0] == offset + size:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            offset, before = self._free.pop(at - 1)
            size += before
        insort(self._free, (offset, size))
