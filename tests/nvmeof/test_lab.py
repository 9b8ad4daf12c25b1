"""The short form of the NVMe-oF lab: a guest under emulation with a real target, real faults and two hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    "boot", "array", "kit", "kills", "cold-recovery", "rdma", "link-down", "reset", "target-killed", "path-gone", "nfs",
    "drive-failed", "xfs-twice",
)  # fmt: skip
CANNOT_BE_BUILT = 3

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="the guest mounts this machine's root file system: needs root"),
]


def test_every_case_of_the_short_form_holds() -> None:
    command = [str(ROOT / "lab" / "nvmeof" / "run"), "--short", "--python", sys.executable]
    lab = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if lab.returncode == CANNOT_BE_BUILT:
        pytest.skip(f"no guest can be built here: {lab.stderr.strip() or lab.stdout.strip()}")
    print(lab.stdout)
    found = dict(re.findall(r"^([a-z-]+) (ok|FAILED|skipped) ", lab.stdout, re.MULTILINE))
    assert {name: found.get(name) for name in CASES} == dict.fromkeys(CASES, "ok"), lab.stdout[-3000:]
    assert lab.returncode == 0


def test_nothing_is_left_behind() -> None:
    left = subprocess.run(
        ["pgrep", "-f", "qemu-system-x86_64.*rewarm-nvmeof"], capture_output=True, text=True, check=False
    )
    assert not left.stdout
    assert not list(Path("/tmp").glob("rewarm-nvmeof-*"))


def test_an_unknown_case_is_refused() -> None:
    command = [str(ROOT / "lab" / "nvmeof" / "run"), "--only", "no-such-case", "--python", sys.executable]
    lab = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert lab.returncode == 2
    assert "unknown case no-such-case" in lab.stderr
