"""Several hosts on one machine: each has its own network, mounts, processes and name, and all share a switch.

A host is one holder process, the first of its process namespace: killing it ends everything that runs in the host and
unmounts everything that was mounted there, even where a client hangs. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

HOLDER = "trap : TERM INT HUP; while :; do sleep 3600 & wait $!; done"
UNSHARE = ["unshare", "-n", "-m", "-p", "-u", "-f", "--kill-child", "--mount-proc", "--propagation", "private"]
COMMAND_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
SWITCH = "switch"


def skip_without(*tools: str) -> None:
    """Skip, and say why, where the lab cannot exist."""
    if os.geteuid() != 0:
        pytest.skip("hosts on one machine need root")
    missing = [tool for tool in (*tools, "unshare", "nsenter", "ip") if not shutil.which(tool, path=_path())]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no namespaces")


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Host:
    """One host; `address` is its IP on the switch."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self._unshare = subprocess.Popen(
            [*UNSHARE, "bash", "-c", HOLDER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.holder = self._first_child(self._unshare.pid)
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def _first_child(self, parent: int) -> int:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        deadline = time.monotonic() + COMMAND_S
        while time.monotonic() < deadline:
            found = children.read_text().split()
            if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "bash":
                return int(found[0])
            time.sleep(0.01)
        raise TimeoutError(f"host {self.name} does not come up")

    def inside(self, *words: str) -> list[str]:
        """The command line that runs `words` in this host."""
        return ["nsenter", "-t", str(self.holder), "-n", "-m", "-p", "-u", "--", *words]

    def run(self, *words: str, check: bool = True, timeout: float = COMMAND_S) -> str:
        """Run a command to its end; returns what it prints."""
        done = subprocess.run(
            self.inside(*words), capture_output=True, text=True, timeout=timeout, check=False, env=self._environment()
        )
        assert not check or not done.returncode, f"{self.name}: {' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that is told and asked through pipes."""
        return subprocess.Popen(
            self.inside(*words),
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": _path(),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        }

    def pids(self, name: str) -> list[int]:
        """Processes of this host by the name of their program, as this machine numbers them."""
        mine = os.readlink(f"/proc/{self.holder}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "pid") == mine and (folder / "comm").read_text().strip() == name:
                    found.append(int(folder.name))
        return found

    def signal(self, name: str, number: signal.Signals) -> int:
        """Signal every process of that program; returns how many."""
        pids = self.pids(name)
        for pid in pids:
            os.kill(pid, number)
        return len(pids)

    def kill(self) -> None:
        """Power the host off."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.holder, signal.SIGKILL)
        self._unshare.wait(COMMAND_S)


class Network:
    """A switch and the hosts on it; a context manager that leaves nothing behind."""

    def __init__(self, names: Sequence[str]) -> None:
        self._switch: Host | None = None
        self.hosts: dict[str, Host] = {}
        self._names = names

    def __enter__(self) -> Network:
        try:
            self._switch = Host(SWITCH, "")
            self._switch.run("ip", "link", "add", "br0", "type", "bridge")
            self._switch.run("ip", "link", "set", "br0", "up")
            for number, name in enumerate(self._names):
                self.plug_in(name, f"{NETWORK}.{11 + number}")
        except BaseException:
            self.close()
            raise
        return self

    def plug_in(self, name: str, address: str) -> Host:
        """A new host on the switch, or the same host after its power was off."""
        assert self._switch is not None
        host = self.hosts[name] = Host(name, address)
        far, near = f"v-{name}", "eth0"
        ends = ["netns", str(self._switch.holder), "type", "veth", "peer", "name", near, "netns", str(host.holder)]
        subprocess.run(["ip", "link", "add", far, *ends], check=True, env={"PATH": _path()})
        self._switch.run("ip", "link", "set", far, "master", "br0")
        self._switch.run("ip", "link", "set", far, "up")
        host.run("ip", "addr", "add", f"{address}/24", "dev", near)
        host.run("ip", "link", "set", near, "up")
        return host

    def cut(self, name: str) -> None:
        """Pull the cable: packets are lost, nobody is told."""
        assert self._switch is not None
        self._switch.run("ip", "link", "set", f"v-{name}", "down")

    def heal(self, name: str) -> None:
        """Plug the cable in again."""
        assert self._switch is not None
        self._switch.run("ip", "link", "set", f"v-{name}", "up")

    def close(self) -> None:
        """Power everything off."""
        for host in (*self.hosts.values(), *([self._switch] if self._switch else [])):
            host.kill()
        self.hosts = {}

    def __exit__(self, *_: object) -> None:
        self.close()
