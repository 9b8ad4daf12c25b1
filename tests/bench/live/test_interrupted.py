"""Ctrl-C at any moment of a live run: it ends at once, no process is left, and what was ended is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.bench.live.scripted import Scripted

pytestmark = pytest.mark.crash

WAIT_S = 30.0


def run(server: Scripted, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rewarm", "bench", "--server", f"a={server.url}", "--tokens", "50"]
    command += ["--concurrency", "2", "--repeats", "1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for(what: str, seen: object) -> None:
    end_s = time.monotonic() + WAIT_S
    while not seen():  # type: ignore[operator]
        assert time.monotonic() < end_s, f"{what} did not happen"
        time.sleep(0.02)


def processes_of_group(group: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def test_during_the_restart_command(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    with Scripted() as server:
        process = run(server, "--restart", f"a=echo $$ > {marker}.new; mv {marker}.new {marker}; sleep 600 & wait")
        wait_for("the restart", marker.exists)
        hook = int(marker.read_text())
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert f"stopped the restart command of a (process group {hook})" in errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    wait_for("the end of the command's children", lambda: not processes_of_group(hook))


@pytest.mark.parametrize("fault", ["hang", "silent"])
def test_while_requests_are_under_way(fault: str) -> None:
    with Scripted(fault=fault) as server:
        process = run(server, "--cold", "a=none")
        wait_for("a request of the cell", lambda: any(entry["wanted"] > 2 for entry in server.record()))
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "ended the requests under way and closed" in errors
    assert "Traceback" not in errors
