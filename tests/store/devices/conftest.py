"""Fixtures of the device suites: each rung in turn, a file of known bytes, page-aligned memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.store.devices.helpers import BLOCK, BLOCKS, DEPTH

from rewarm.store.devices.base import Device
from rewarm.store.devices.select import LADDER


@pytest.fixture(params=list(LADDER))
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each rung in turn."""
    made = LADDER[request.param](DEPTH)
    yield made
    made.close()


@pytest.fixture
def content() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, BLOCK * BLOCKS, np.uint8)


@pytest.fixture
def fd(tmp_path: Path, content: npt.NDArray[np.uint8]) -> Iterator[int]:
    """A file of `content`, opened with O_DIRECT where the file system has it."""
    path = tmp_path / "data"
    path.write_bytes(content.tobytes())
    try:
        opened = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.fixture
def arena() -> npt.NDArray[np.uint8]:
    """Page-aligned memory, as long as the file."""
    return np.frombuffer(mmap.mmap(-1, BLOCK * BLOCKS), np.uint8)
