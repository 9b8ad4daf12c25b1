"""The fabric of the lab: an NVMe-oF target in a network namespace of its own, links to it, controllers of two hosts.

The target's sockets live behind virtual Ethernet pairs, one for each link, so that a link can go down under a wave as
a cable does. `run` raises with the tool's own words.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

CONFIG = Path("/sys/kernel/config/nvmet")
NQN = "nqn.2026-11.org.rewarm.lab"
HOST_IDS = {"A": "aaaaaaaa-0000-0000-0000-000000000001", "B": "bbbbbbbb-0000-0000-0000-000000000002"}
TARGET_SPACE = "target"
LINKS = {"A": ("10.91.1.1", "10.91.1.2"), "B": ("10.91.2.1", "10.91.2.2")}
"""Link: (address of the host's end, address of the target's end)."""
RAM_DRIVES = 7
RAM_DRIVE_KIB = 330_000  # XFS wants 300 MB


def run(*command: str, check: bool = True, timeout_s: float = 120, space: str | None = None) -> str:
    """Run a tool; returns what it printed. Raises `RuntimeError` with its words."""
    # Not ip netns exec: it mounts another /sys, without the target.
    prefix = ["nsenter", f"--net=/run/netns/{space}"] if space else []
    found = subprocess.run(
        [*prefix, *command], capture_output=True, text=True, timeout=timeout_s, check=False, env=tool_environment()
    )
    if check and found.returncode:
        raise RuntimeError(f"{' '.join(command)}: {found.stderr.strip() or found.stdout.strip() or found.returncode}")
    return found.stdout


def tool_environment() -> dict[str, str]:
    """The tools that came with the guest are found behind those of the machine."""
    tools = "/rewarm-lab/tools"
    return os.environ | {
        "PATH": f"{os.environ['PATH']}:{tools}/sbin:{tools}/usr/sbin:{tools}/usr/bin",
        "LD_LIBRARY_PATH": f"{tools}/lib/x86_64-linux-gnu:{tools}/usr/lib/x86_64-linux-gnu",
    }


def until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Wait for something to become true. Raises `RuntimeError` naming it."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


def load_modules() -> None:
    """Everything the fabric needs. Two hosts on one kernel need their controllers kept apart: no multipath."""
    run("modprobe", "nvme_core", "multipath=N")
    # Before rdma_rxe: its checksum is asked for in a name space where no module can be loaded.
    names = [
        "crc32_generic", "configfs", "nvme", "nvmet", "nvmet-tcp", "nvme-tcp", "raid0", "xfs", "veth", "nfsd", "nfs",
        "nfsv4",
    ]  # fmt: skip
    for name in names:
        run("modprobe", name, check=False)
    run("modprobe", "brd", f"rd_nr={RAM_DRIVES}", f"rd_size={RAM_DRIVE_KIB}", "max_part=0")
    if not CONFIG.exists():
        run("mount", "-t", "configfs", "none", "/sys/kernel/config")


def make_links() -> None:
    """One pair of virtual Ethernet for each link; the far ends belong to the target."""
    run("ip", "netns", "add", TARGET_SPACE)
    run("ip", "link", "set", "lo", "up", space=TARGET_SPACE)
    for name, (near, far) in LINKS.items():
        run("ip", "link", "add", f"host{name}", "type", "veth", "peer", "name", f"target{name}", "netns", TARGET_SPACE)
        run("ip", "addr", "add", f"{near}/24", "dev", f"host{name}")
        run("ip", "link", "set", f"host{name}", "up")
        run("ip", "addr", "add", f"{far}/24", "dev", f"target{name}", space=TARGET_SPACE)
        run("ip", "link", "set", f"target{name}", "up", space=TARGET_SPACE)


def set_link(name: str, *, up: bool) -> None:
    """Pull or plug a cable: frames vanish, nobody is told."""
    run("ip", "link", "set", f"target{name}", "up" if up else "down", space=TARGET_SPACE)


def ram_drive(number: int) -> str:
    """Device of a drive in the guest's memory."""
    return f"/dev/ram{number}"


def small_drive(name: str, size: int) -> str:
    """A drive of so many bytes, in a file: one that is soon full."""
    path = Path("/dev/shm") / f"{name}.drive"
    with open(path, "wb") as file:
        file.truncate(size)
    return str(path)


class Subsystem:
    """One subsystem of the target with namespaces on drives."""

    def __init__(self, name: str, drives: Iterable[str]) -> None:
        self.nqn = f"{NQN}:{name}"
        self.path = CONFIG / "subsystems" / self.nqn
        self.path.mkdir()
        (self.path / "attr_allow_any_host").write_text("1")
        for i, drive in enumerate(drives, start=1):
            namespace = self.path / "namespaces" / str(i)
            namespace.mkdir()
            (namespace / "device_path").write_text(drive)
            if not drive.startswith("/dev/ram"):
                (namespace / "buffered_io").write_text("1")
            self.enable(i, on=True)

    def enable(self, namespace: int, *, on: bool) -> None:
        """Take a drive out of the array, or put it back."""
        (self.path / "namespaces" / str(namespace) / "enable").write_text("1" if on else "0")


class Port:
    """One listening port of the target. `kind` is tcp or rdma; made inside the target's space for tcp."""

    def __init__(self, number: int, kind: str, address: str, service: int) -> None:
        self.kind, self.address, self.service = kind, address, service
        self.path = CONFIG / "ports" / str(number)
        self.path.mkdir()
        for name, value in (
            ("addr_adrfam", "ipv4"), ("addr_trtype", kind), ("addr_traddr", address), ("addr_trsvcid", str(service)),
        ):  # fmt: skip
            (self.path / name).write_text(value)

    def offer(self, subsystem: Subsystem) -> None:
        """Listen. The socket belongs to the network space of whoever makes this link."""
        space = TARGET_SPACE if self.kind == "tcp" else None
        run("ln", "-s", str(subsystem.path), str(self.path / "subsystems" / subsystem.nqn), space=space)

    def kill(self, subsystem: Subsystem) -> None:
        """The target goes away: all its controllers with it."""
        (self.path / "subsystems" / subsystem.nqn).unlink()


class Controller:
    """A host's connection to a subsystem: /dev/nvmeX. Raises `RuntimeError` where it cannot be made."""

    def __init__(self, host: str, port: Port, subsystem: Subsystem, **options: int) -> None:
        self.subsystem = subsystem
        wanted = {
            "transport": port.kind, "traddr": port.address, "trsvcid": port.service, "nqn": subsystem.nqn,
            "hostnqn": f"nqn.2014-08.org.nvmexpress:uuid:{HOST_IDS[host]}", "hostid": HOST_IDS[host],
            "nr_io_queues": 2, "keep_alive_tmo": 5, "reconnect_delay": 1, **options,
        }  # fmt: skip
        # Written to the kernel itself: the tool believes that a second host of one machine is connected already.
        with open("/dev/nvme-fabrics", "r+b", buffering=0) as fabrics:
            fabrics.write(",".join(f"{name}={value}" for name, value in wanted.items()).encode())
            answer = fabrics.read(4096).decode()
        self.name = f"nvme{answer.split('instance=')[1].split(',')[0]}"
        self.path = Path("/sys/class/nvme") / self.name
        count = len(list((subsystem.path / "namespaces").iterdir()))
        until(lambda: len(self.drives()) == count, f"{count} drives of {self.name}")

    def drives(self) -> list[str]:
        """Devices of its namespaces, in order."""
        return sorted(str(path) for path in Path("/dev").glob(f"{self.name}n[0-9]*"))

    def state(self) -> str:
        """live, connecting, or gone."""
        try:
            return (self.path / "state").read_text().strip()
        except OSError:
            return "gone"

    def reset(self) -> None:
        """What an administrator or a firmware does."""
        (self.path / "reset_controller").write_text("1")

    def disconnect(self) -> None:
        """Let go."""
        if self.state() != "gone":
            (self.path / "delete_controller").write_text("1")
            until(lambda: self.state() == "gone", f"{self.name} goes")


def make_array(drives: list[str], name: str = "/dev/md0") -> str:
    """An md RAID 0 over drives, as arrays present one volume."""
    run("mdadm", "--create", name, "--run", "--level=0", "--chunk=512", f"--raid-devices={len(drives)}", *drives)
    return name


def make_xfs(device: str, place: str) -> Path:
    """A fresh XFS, mounted."""
    run("mkfs.xfs", "-q", "-f", "-K", device)
    return mount(device, place)


def mount(device: str, place: str, kind: str = "xfs", options: str = "defaults") -> Path:
    """Mount a device."""
    Path(place).mkdir(parents=True, exist_ok=True)
    run("mount", "-t", kind, "-o", options, device, place)
    return Path(place)
