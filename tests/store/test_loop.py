"""How much an I/O loop keeps in flight: by what its medium moves, within bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.faulty_store import FaultyStore

from rewarm.store.loop import IN_FLIGHT_BYTES_MAX, IN_FLIGHT_BYTES_MIN, IN_FLIGHT_S, PACE_S, SLOWER_S
from rewarm.store.reading import ReadLoop


@pytest.mark.parametrize(
    ("bytes_per_s", "budget"),
    [
        (1e6, IN_FLIGHT_BYTES_MIN),
        (1e9, int(1e9 * IN_FLIGHT_S)),
        (50e9, IN_FLIGHT_BYTES_MAX),
    ],
)
def test_bytes_in_flight_follow_the_medium(tmp_path: Path, bytes_per_s: float, budget: int) -> None:
    with FaultyStore(tmp_path, "&poll=1h") as faulty:
        loop: ReadLoop = faulty.store._reads
        loop._moved, loop._moved_since_s = int(bytes_per_s), 100.0
        loop._adapt(100.0 + PACE_S / 2)
        assert loop._budget == IN_FLIGHT_BYTES_MIN, "too short a time says nothing"
        loop._adapt(101.0)
        assert loop._budget == budget
        assert loop._moved == 0


def test_bytes_in_flight_fall_slowly(tmp_path: Path) -> None:
    with FaultyStore(tmp_path, "&poll=1h") as faulty:
        loop: ReadLoop = faulty.store._reads
        loop._budget, loop._moved, loop._moved_since_s = IN_FLIGHT_BYTES_MAX, 0, 100.0
        loop._adapt(100.0 + 2 * PACE_S)
        assert 0.9 * IN_FLIGHT_BYTES_MAX < loop._budget < IN_FLIGHT_BYTES_MAX, "one late look says little"
        for number in range(3, int(8 * SLOWER_S / PACE_S)):
            loop._adapt(100.0 + number * PACE_S)
        assert loop._budget < 1.05 * IN_FLIGHT_BYTES_MIN
        loop._moved, loop._moved_since_s = int(50e9), 199.0
        loop._adapt(200.0)
        assert loop._budget == IN_FLIGHT_BYTES_MAX, "and rises at once"
