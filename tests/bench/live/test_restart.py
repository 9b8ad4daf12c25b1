"""A restart command that is interrupted while it starts leaves no process either."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from rewarm.bench.live.forcing import run_hook


def running(mark: str) -> list[str]:
    """Processes with an argument of this text, by number."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in line.read_bytes().split(b"\0"):
                found.append(line.parent.name)
    return found


@pytest.mark.parametrize("steps", range(8))
def test_an_interruption_while_it_starts(steps: int) -> None:
    mark = f"600.00{steps}"
    said: list[str] = []

    async def interrupted() -> None:
        task = asyncio.create_task(run_hook("a", f"sleep {mark} & wait", said.append))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert running(mark) == []
    assert steps < 2 or said, "what was started is said to be stopped"
