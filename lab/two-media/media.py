"""Media with a speed: XFS on loop devices whose reads the kernel throttles for the processes of one cgroup (v1, blkio).

with Lab(["local", "array"], image_bytes, directory) as lab:
    lab.set_rate("local", 150e6)
    process = lab.start(["rewarm", "bench", ..])     # its reads of the media go at their rates

What was made goes away with the block and also when the process is killed: a guardian outside of it sees to that.
The images lie in a directory of the caller's; on a memory file system the loop device adds nothing to the throttle.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parent))
import guardian

PREFIX = "rewarm-lab-"
BLKIO = Path("/sys/fs/cgroup/blkio")
TOOLS = ("losetup", "mkfs.xfs", "mount", "umount")
TOOL_S = 60.0
READ_LIMIT = "blkio.throttle.read_bps_device"


def missing() -> str | None:
    """Why no lab can be made here; None where it can."""
    if os.geteuid() != 0:
        return "loop devices and cgroups need root"
    if not (BLKIO / READ_LIMIT).exists():
        return f"no cgroup v1 with blkio throttling at {BLKIO}"
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    tools = [tool for tool in TOOLS if not shutil.which(tool)]
    if tools:
        return f"not installed: {', '.join(tools)} (Debian: xfsprogs, mount)"
    return None


def shared_memory(need_bytes: int = 0) -> Path | None:
    """A directory in memory with so much room, where nothing but the throttle is measured; None where there is none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and shutil.disk_usage(shm).free > need_bytes else None


class Lab:
    """See the module. `names` are the media; each gets an image of `image_bytes`, which takes only what is written."""

    def __init__(self, names: Sequence[str], image_bytes: int, directory: Path) -> None:
        mark = f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        self._names = names
        self._image_bytes = image_bytes
        self._devices: dict[str, str] = {}
        self._guardian: subprocess.Popen[bytes] | None = None
        self._alive = -1
        self._children: list[subprocess.Popen[Any]] = []
        self.base = directory / mark
        self.cgroup = BLKIO / mark

    def __enter__(self) -> Self:
        sweep(self.base.parent)
        reading, self._alive = os.pipe()
        words = [sys.executable, guardian.__file__, str(self.base), str(self.cgroup)]
        self._guardian = subprocess.Popen(words, stdin=reading, start_new_session=True)
        os.close(reading)
        try:
            self.base.mkdir(mode=0o700)
            self.cgroup.mkdir()
            for name in self._names:
                self._make(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def path(self, name: str) -> Path:
        """Where a medium is mounted."""
        return self.base / name

    def set_rate(self, name: str, bytes_per_s: float) -> None:
        """Throttle the reads of a medium from now on."""
        number = os.stat(self._devices[name]).st_rdev
        limit = f"{os.major(number)}:{os.minor(number)} {int(bytes_per_s)}\n"
        (self.cgroup / READ_LIMIT).write_text(limit)

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process whose reads are throttled, and all that it starts; it is ended with the lab."""
        procs = str(self.cgroup / "cgroup.procs")
        inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', procs, *words]
        process = subprocess.Popen(inside, **options)
        self._children.append(process)
        return process

    def close(self) -> None:
        """Take everything down. The guardian says on stderr what it removed."""
        if self._guardian is None:
            return
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        for child in self._children:
            child.wait(guardian.PATIENCE_S)
        os.close(self._alive)
        self._guardian.wait(4 * guardian.PATIENCE_S)
        self._guardian = None

    def _make(self, name: str) -> None:
        image = self.base / f"{name}.img"
        with open(image, "wb") as file:
            file.truncate(self._image_bytes)
        # Direct I/O where the file system of the image knows it; tmpfs does not, and has no cache of its own to pass.
        device = self._tool(
            "losetup",
            "--find",
            "--show",
            "--direct-io=on",
            str(image),
            otherwise=["losetup", "--find", "--show", str(image)],
        )
        self._devices[name] = device
        self._tool("mkfs.xfs", "-q", device)
        self.path(name).mkdir()
        self._tool("mount", "-t", "xfs", device, str(self.path(name)))

    def _tool(self, *words: str, otherwise: Sequence[str] = ()) -> str:
        """Run a tool to its end; it holds the guardian back meanwhile."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=TOOL_S,
            pass_fds=(self._alive,), start_new_session=True,
        )  # fmt: skip
        if done.returncode and otherwise:
            return self._tool(*otherwise)
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()


def sweep(directory: Path) -> None:
    """Remove labs whose builder and guardian were both killed."""
    bases = {path.name: path for path in directory.glob(f"{PREFIX}*")}
    cgroups = {path.name: path for path in BLKIO.glob(f"{PREFIX}*")}
    for mark in {*bases, *cgroups}:
        if not _alive(int(mark.removeprefix(PREFIX).split("-")[0])):
            guardian.undo(bases.get(mark, directory / mark), cgroups.get(mark, BLKIO / mark))


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
