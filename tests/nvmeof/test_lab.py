"""The short form of the NVMe-oF lab: a guest under emulation with a real target, real faults and two hosts."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    "boot", "array", "kit", "kills", "cold-recovery", "rdma", "link-down", "reset", "target-killed", "path-gone",
    "nfs", "raw-hosts", "raw-faults", "raw-gone", "fence", "drive-failed", "xfs-twice", "end",
)  # fmt: skip
CANNOT_BE_BUILT = 3
TERMINATED = 143

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0, reason="the guest mounts this machine's root file system: needs root"),
]


def start(scratch: Path, *options: str) -> subprocess.Popen[str]:
    command = [str(ROOT / "lab" / "nvmeof" / "run"), "--python", sys.executable, *options]
    environment = os.environ | {"TMPDIR": str(scratch)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def assert_nothing_is_left(scratch: Path) -> None:
    left = subprocess.run(["pgrep", "-f", f"qemu.*{scratch}"], capture_output=True, text=True, check=False)
    assert not left.stdout
    assert not list(scratch.iterdir())


def test_every_case_of_the_short_form_holds_and_nothing_is_left(tmp_path: Path) -> None:
    faulthandler.cancel_dump_traceback_later()  # This one takes longer than a test that hangs.
    with start(tmp_path, "--short") as lab:
        printed, errors = lab.communicate(timeout=1000)
    if lab.returncode == CANNOT_BE_BUILT:
        pytest.skip(f"no guest can be built here: {errors.strip() or printed.strip()}")
    print(printed)
    found = dict(re.findall(r"^([a-z-]+) (ok|FAILED|skipped) ", printed, re.MULTILINE))
    assert {name: found.get(name) for name in CASES} == dict.fromkeys(CASES, "ok"), printed[-6000:]
    assert lab.returncode == 0
    assert_nothing_is_left(tmp_path)


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "--short", "--only", "array") as lab:
        assert lab.stdout
        line = next((line for line in lab.stdout if line.startswith("boot ")), "")
        if not line and lab.wait(60) == CANNOT_BE_BUILT:
            pytest.skip("no guest can be built here")
        assert list(tmp_path.iterdir())
        lab.send_signal(signal.SIGTERM)
        assert lab.wait(60) == TERMINATED
    assert_nothing_is_left(tmp_path)


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    with start(tmp_path, "--only", "no-such-case") as lab:
        _, errors = lab.communicate(timeout=300)
    assert lab.returncode == 2
    assert "unknown case no-such-case" in errors
