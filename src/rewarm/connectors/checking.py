"""One part of a start that `rewarm connect ENGINE --check` tried, whatever the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from rewarm.errors import RewarmError


class Check(msgspec.Struct, frozen=True):
    """One part that was tried: `ok`, and what was found or what to do."""

    part: str
    ok: bool
    what: str


def attempt(parts: Sequence[tuple[str, Callable[[], str]]]) -> Iterator[Check]:
    """Try parts one after the other; a part that cannot be tried is one that failed."""
    for part, try_it in parts:
        try:
            yield Check(part, True, try_it())
        except (RewarmError, OSError, ImportError) as error:
            yield Check(part, False, str(error))
