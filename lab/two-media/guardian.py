"""Takes a lab apart when whoever built it has gone, however it went: Ctrl-C, an error, or kill -9.

python guardian.py BASE CGROUP: waits for the end of its stdin, which the builder and every tool that it runs hold open.
Then it ends the processes of CGROUP, unmounts what is mounted below BASE, detaches the loop devices of files there, and
removes both directories. All of it is found by name, so nothing can be forgotten between making and noting it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 20.0
"""For the processes of the cgroup to clean up behind themselves, and for a mount to become free."""


def main(base: Path, cgroup: Path) -> None:
    """Wait, then clean up and say what was cleaned."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    undo(base, cgroup)


def undo(base: Path, cgroup: Path) -> None:
    """Remove a lab; harmless when some of it is gone or was never made."""
    end_processes(cgroup)
    for mount in mounts_below(base):
        deadline = time.monotonic() + PATIENCE_S
        while call("umount", mount) and time.monotonic() < deadline:
            time.sleep(0.05)
        say(f"unmounted {mount}" if mount not in mounts_below(base) else f"could not unmount {mount}")
    for image in sorted(base.glob("*.img")):
        for device in devices_of(image):
            call("losetup", "--detach", device)
            say(f"detached {device}")
    if base.exists():
        shutil.rmtree(base, ignore_errors=True)
        say(f"could not remove {base}" if base.exists() else f"removed {base}")
    with contextlib.suppress(OSError):
        cgroup.rmdir()
        say(f"removed {cgroup}")


def end_processes(cgroup: Path) -> None:
    """Ask the processes of the cgroup to end, then make them."""
    deadline = time.monotonic() + PATIENCE_S
    asked: set[int] = set()
    while pids := processes_of(cgroup):
        late = time.monotonic() > deadline
        if time.monotonic() > deadline + PATIENCE_S:
            say(f"processes that do not end: {pids}")
            return
        for pid in pids:
            if late or pid not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.05)


def processes_of(cgroup: Path) -> list[int]:
    try:
        return [int(line) for line in (cgroup / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def mounts_below(base: Path) -> list[str]:
    """Mount points below a directory, the deepest first."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted((line.split()[4] for line in lines if line.split()[4].startswith(f"{base}/")), reverse=True)


def devices_of(image: Path) -> list[str]:
    shown = subprocess.run(
        ["losetup", "-j", str(image)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return [line.split(":")[0] for line in shown.stdout.splitlines()]


def call(*words: str) -> int:
    return subprocess.run(words, capture_output=True, check=False, stdin=subprocess.DEVNULL).returncode


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody may be left to hear it
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
