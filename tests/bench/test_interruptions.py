"""Ctrl-C, SIGTERM and a killed terminal at random moments of real commands: no data, no processes, and it is said."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lengths import repeated

from rewarm.cli import exits

SMALL = ["--tokens", "64", "--block-tokens", "16", "--concurrency", "2,4", "--repeats", "3"]
COMMANDS = {
    "bench": (["bench", "--target", "disk={}", "--target", "slow={}", "--emulate", "slow=30MB/s", *SMALL], 5.0),
    "bench-ranks": (["bench", "--target", "disk={}", "--tp", "2", *SMALL], 5.0),
    "probe": (["probe", "{}"], 6.0),
    "demo": (["demo", "--dir", "{}", "--report", "/dev/null"], 10.0),
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def group(pid: int) -> list[int]:
    """Processes that came from `pid`: of its session, or whose parent it is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and pid in (int(fields[1]), int(fields[3])):
                found.append(int(entry.name))
    return found


def interrupt(name: str, folder: Path, chance: random.Random) -> None:
    """Start a command, send one to three signals at random moments, and look at what is left."""
    (folder / "mine").write_text("precious")
    words, longest_s = COMMANDS[name]
    process = subprocess.Popen(
        [sys.executable, "-m", "rewarm", *(word.format(folder) for word in words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not list(folder.glob("rewarm-run-*")) and process.poll() is None:
        assert time.monotonic() < deadline
    started = process.poll() is None
    time.sleep(chance.uniform(0, longest_s))
    sent = chance.choice(SIGNALS)
    for _ in range(chance.randint(1, 2)):
        process.send_signal(sent)
        time.sleep(chance.uniform(0, 0.05))
    stdout, errors = process.communicate(timeout=60)
    where = f"{name}, {signal.Signals(sent).name}: {process.returncode}\n{stdout}\n{errors}"
    assert started, where
    # A signal that comes after the run has cleaned up and printed ends the process as it ends any other.
    assert process.returncode in (exits.INTERRUPTED, exits.OK, exits.FINDINGS, -sent), where
    assert [path.name for path in folder.iterdir()] == ["mine"], where
    assert f"removed {folder}" in errors, where
    assert "Traceback" not in errors, where
    deadline = time.monotonic() + 5  # a rank that the kernel ends with its parent is a moment later gone
    while group(process.pid):
        assert time.monotonic() < deadline, where
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()


@pytest.mark.crash
def test_a_run_of_several_ranks_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    interrupt("bench-ranks", tmp_path, random.Random(3))


@pytest.mark.crash
@pytest.mark.parametrize("seed", range(repeated(2, 4)))
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interruption_at_any_moment_leaves_nothing(name: str, seed: int, tmp_path: Path) -> None:
    interrupt(name, tmp_path, random.Random(f"{name} {seed}"))


@pytest.mark.crash
def test_what_a_killed_run_leaves_is_removed_by_the_next_and_its_ranks_die_with_it(tmp_path: Path) -> None:
    words, _ = COMMANDS["bench-ranks"]
    command = [sys.executable, "-m", "rewarm", *(word.format(tmp_path) for word in words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + 30
    while len(ranks := group(process.pid)) < 2:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}/fd") and group(pid) for pid in ranks):
        assert time.monotonic() < deadline, "a rank outlives its run"
        time.sleep(0.05)
    assert list(tmp_path.glob("rewarm-run-*"))
    again = subprocess.run([*command, "--repeats", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == exits.OK, again.stderr
    assert "left behind by a run that was killed" in again.stderr
    assert list(tmp_path.iterdir()) == []
