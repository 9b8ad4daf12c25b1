"""A raw pool as a target: measured through the store, proven cold, and what others have in it is still there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_replay import SESSION_BYTES, job
from tests.store.raw.devices import loop_over, make_file

import rewarm
from rewarm.bench.cold import PROVEN
from rewarm.bench.pools import NAMESPACE
from rewarm.bench.probe import run_probe
from rewarm.bench.replay import run_job
from rewarm.errors import ConfigError
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.inspection import inspect_raw
from rewarm.testing.kit.base import load, save
from rewarm.testing.payload import make_keys

CAPACITY = 128 << 20
MINE = make_keys(8)
BLOCK = 64 << 10


def save_mine(device: Path, namespace: str) -> None:
    with rewarm.open(f"block://{device}?role=owner&poll=20ms", namespace=namespace) as store:
        save(store, MINE, BLOCK)


def check_run(device: Path, stage: Any) -> list[str]:
    """A run on a pool that holds blocks of somebody; what it told."""
    told: list[str] = []
    save_mine(device, "mine")
    result = run_job(job({"raw": f"block://{device}?poll=50ms"}), stage, told.append)
    assert [cell.cold for cell in result.cells] == [PROVEN] * 4
    assert all(not cell.misses and not cell.wrong_blocks for cell in result.cells)
    assert [cell.bytes.payload for cell in result.cells[:2]] == [SESSION_BYTES, 2 * SESSION_BYTES]
    assert result.ceiling
    assert not result.failures
    with rewarm.open(f"block://{device}?role=reader", namespace="mine") as store:
        assert load(store, MINE, BLOCK) == ["hit"] * 8, "what somebody else saved is still there"
    assert len(inspect_raw(str(device)).namespaces) == 1, "what the run saved is erased"
    return told


def test_a_raw_pool_is_measured_and_left_as_it_was(counted: Path, stage: Any) -> None:
    device = make_file(counted / "device", CAPACITY)
    save_mine(device, NAMESPACE)  # as a run that was killed would have left it
    told = check_run(device, stage)
    assert "left behind by a run that was killed" in told[0]
    assert [text.partition(" ")[0] for text in told] == ["erased", "erased"]


def test_a_pool_without_room_is_refused(tmp_path: Path, stage: Any) -> None:
    device = make_file(tmp_path / "device", 16 << 20)
    with pytest.raises(ConfigError, match=r"target 'raw': the job needs .* has 16.0 MiB free"):
        run_job(job({"raw": f"block://{device}"}), stage, lambda text: None)


def test_a_probe_says_what_to_do_with_a_device(tmp_path: Path, stage: Any) -> None:
    device = make_file(tmp_path / "device", 16 << 20)
    for name in (device, Path(f"block:{device}")):
        with pytest.raises(ConfigError, match=r"rewarm bench --target NAME=block://"):
            run_probe([name], stage, lambda text: None)


@pytest.mark.crash
def test_a_block_device_is_measured(tmp_path: Path, stage: Any) -> None:
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(160 << 20)
    with loop_over(backing) as device:
        format_device(str(device))
        check_run(device, stage)
