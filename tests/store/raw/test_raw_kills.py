"""Owners killed and stopped at any moment, on files and a loop device: what was synced is there, nothing is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.raw.devices import loop_over, make_file, open_as
from tests.store.raw.life import batch_of, size_of

from rewarm.store.contract import Outcome
from rewarm.store.raw.formatting import format_device
from rewarm.testing.kit.base import load

pytestmark = pytest.mark.crash
ROOT = Path(__file__).resolve().parents[3]
CAPACITY = 64 << 20


def start(path: Path, host: str, first: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.raw.life", str(path), host, str(first)]
    life = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert life.stdout is not None
    assert life.stdout.readline() == "ready\n"
    return life


def run_for(life: subprocess.Popen[str], lines: int, rng: random.Random) -> list[int]:
    """Batches that were safe when the life was killed, somewhere behind so many of them."""
    assert life.stdout is not None
    safe = [int(life.stdout.readline()) for _ in range(lines)]
    try:
        life.wait(rng.random() * 0.2)
    except subprocess.TimeoutExpired:
        life.kill()
    life.wait()
    return [*safe, *(int(line) for line in life.stdout.read().split("\n")[:-1])]


def kill_and_look(path: Path, rounds: int) -> None:
    rng, first = random.Random(9), 0
    for _ in range(rounds):
        safe = run_for(start(path, "a", first), 3, rng)
        with open_as(path, "a", "&role=owner") as heir:
            for number in range(first, safe[-1] + 12):
                outcomes = load(heir, batch_of(number), size_of(number))
                assert set(outcomes) <= {Outcome.HIT, Outcome.MISSING}
                if number in safe[-4:]:
                    assert outcomes == [Outcome.HIT] * len(outcomes), f"batch {number} was synced"
            assert heir.check().clean
        first = safe[-1] + 12


def test_kills_on_a_file(tmp_path: Path) -> None:
    kill_and_look(make_file(tmp_path / "device", CAPACITY, "a"), 5)


def test_kills_on_a_loop_device(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(80 << 20)
    with loop_over(backing) as device:
        format_device(str(device), host="a")
        kill_and_look(device, 3)


def test_another_host_reads_while_owners_are_stopped_and_replaced(tmp_path: Path) -> None:
    path = make_file(tmp_path / "device", CAPACITY, "a")
    with open_as(path, "c") as reader:
        stopped = start(path, "a", 0)
        assert stopped.stdout is not None
        safe = [int(stopped.stdout.readline()) for _ in range(3)]
        os.kill(stopped.pid, signal.SIGSTOP)
        heir = start(path, "b", 1000)
        try:
            os.kill(stopped.pid, signal.SIGCONT)
            more = run_for(heir, 2, random.Random(1))
            reader.refresh()
            for number in (safe[-1], *more[-3:]):
                outcomes = load(reader, batch_of(number), size_of(number))
                assert set(outcomes) <= {Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT}
            assert Outcome.HIT in outcomes, "what the heir synced last is there"
        finally:
            for life in (stopped, heir):
                life.kill()
                life.wait()
