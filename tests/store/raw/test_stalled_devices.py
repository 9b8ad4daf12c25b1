"""A block device that stalls for real ends every verb within its bound, and serves again when it answers again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.raw.devices import loop_over
from tests.store.raw.stalled import LIMITS

from rewarm.store.raw.formatting import format_device

pytestmark = pytest.mark.crash
ROOT = Path(__file__).resolve().parents[3]
GROUPS = Path("/sys/fs/cgroup/blkio")
BOUND_S = 20.0


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """A control group that can throttle devices; skips where there is none."""
    group = GROUPS / f"rewarm-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {GROUPS}: {error.strerror}")
    try:
        if not all((group / limit).exists() for limit in LIMITS):
            pytest.skip(f"{GROUPS} cannot throttle devices")
        yield group
    finally:
        group.rmdir()


def test_every_verb_ends_while_the_device_stalls(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(16 << 20)
    with control_group() as group, loop_over(backing) as device:
        format_device(str(device), host="a")
        life = subprocess.run(
            [sys.executable, "-m", "tests.store.raw.stalled", str(device), str(group)],
            cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert life.returncode == 0, life.stderr
    found = json.loads(life.stdout)
    assert found["lookup"][1] == "4"
    assert found["load"][1] == str(["timed_out"] * 4)
    assert "stored" not in found["save"][1]
    for verb in ("refresh", "check", "flush", "open"):
        assert found[verb][1].startswith("StorageError"), found
    assert found["back"][1] == str(["hit"] * 4)
    late = {verb: seconds for verb, (seconds, _) in found.items() if seconds > BOUND_S}
    assert not late, found
