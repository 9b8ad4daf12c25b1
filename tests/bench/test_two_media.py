"""Media that the kernel throttles: the published table's shape, differences told from noise, nothing left behind."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rewarm.bench.compare import compare
from rewarm.bench.result import Result

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "lab" / "two-media"
LANES, RUNS = 10, 2
"""Runs at one time, each on three media of its own, and how often."""
RATE = 20e6
"""Bytes/s: a wave takes 1.7 s, some twenty times what the kernel's throttle lets pass at first, sometimes."""
KINDS = {"one": RATE, "other": RATE, "slower": RATE / 1.2}


@pytest.fixture
def media(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that makes throttled media."""
    monkeypatch.syspath_prepend(str(LAB))
    import media as module  # type: ignore[import-not-found]

    if reason := module.missing():
        pytest.skip(f"no throttled media here: {reason}")
    return module


def left_of(media: Any, directory: Path) -> list[str]:
    """Whatever of a lab is still there: directories, mounts, loop devices, cgroups."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(directory) in line]
    loops = subprocess.run(["losetup", "-l", "-n", "-O", "BACK-FILE"], capture_output=True, text=True, check=True)
    return [
        *map(str, directory.iterdir()),
        *mounts,
        *(line for line in loops.stdout.splitlines() if str(directory) in line),
    ]


def cgroups(media: Any, pid: int) -> list[Path]:
    return list(media.BLKIO.glob(f"{media.PREFIX}{pid}-*"))


def test_the_short_form_shows_the_published_shape(media: Any, tmp_path: Path) -> None:
    """Ends with 0 only when every cell fits t0 + N S / B and shortest first has its median below 0.6 of that."""
    words = [sys.executable, str(LAB / "run.py"), "--short"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert len([line for line in shown.stdout.splitlines() if " | " in line]) == 7, "a head, and a line for each cell"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_stopped_at_any_moment_leaves_nothing(media: Any, tmp_path: Path, number: int) -> None:
    words = [sys.executable, str(LAB / "run.py"), "--short", "--dir", str(tmp_path)]
    chance = random.Random(number)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, moment = time.monotonic() + 30, time.monotonic() + chance.uniform(0, 5)
    while not list(tmp_path.iterdir()) or time.monotonic() < moment:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    # The guardian holds stderr open until it has cleaned up.
    _, errors = process.communicate(timeout=90)
    assert left_of(media, tmp_path) == []
    assert cgroups(media, process.pid) == []
    assert f"removed {tmp_path}" in errors


def test_a_target_is_no_different_from_itself_and_a_throttle_a_fifth_lower_is_told_apart(
    media: Any, tmp_path: Path
) -> None:
    """Each in at least 19 of 20 runs: real reads, cold and proven, in ten labs of two equal media and a slower one.

    Not one medium twice: after a pause the throttle lets more pass, so the second in turn would be slower.
    """
    rates = {f"{kind}{lane}": rate for lane in range(LANES) for kind, rate in KINDS.items()}
    script = str(Path(__file__).with_name("throttled_runs.py"))
    with media.Lab(list(rates), 400 << 20, media.shared_memory() or tmp_path) as lab:
        for name, rate in rates.items():
            lab.set_rate(name, rate)
        running = []
        for lane in range(LANES):
            paths = [*(lab.path(f"{kind}{lane}") for kind in KINDS), tmp_path / f"lane{lane}"]
            words = [sys.executable, script, *map(str, paths), str(RUNS)]
            running.append(lab.start(words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}))
        assert [process.wait(240) for process in running] == [0] * LANES
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(tmp_path.glob("lane*.json"))]
    same, apart = ([verdict(result, target) for result in results] for target in ("other", "slower"))
    assert len(results) == 20
    assert sum(line.startswith("no difference") for line in same) >= 19, same
    assert sum("slower is slower than one" in line for line in apart) >= 19, apart


def verdict(result: Result, target: str) -> str:
    """What is said of a target beside the target `one` of the same run."""
    return compare(("r.json", result), ("r.json", result), ("one", target)).pairs[0].verdict
