"""Pins of a raw pool: slots that this process's owner does not evict."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from rewarm.store.raw.owner import Owner


class RawPin:
    """Blocks whose slots this process does not evict until `release()`."""

    def __init__(self, mask: npt.NDArray[np.bool_], places: list[tuple[int, int]], owner: Owner | None) -> None:
        self.mask = mask
        self._places = places
        self._owner = owner
        if owner:
            with owner.pin_lock:
                for place in places:
                    owner.pins[place] = owner.pins.get(place, 0) + 1

    def release(self) -> None:
        """Let go; calling it twice is harmless."""
        if self._owner:
            with self._owner.pin_lock:
                for place in self._places:
                    self._owner.pins[place] -= 1
        self._places = []

    def __enter__(self) -> RawPin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
