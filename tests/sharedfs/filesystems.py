"""GlusterFS and MooseFS over the hosts of the lab, with the settings of docs/guides/shared-file-systems.md.

Each is a context manager: servers on loop devices, every client host with the volume mounted at `where`. The disks of
the servers lie in memory where there is room: the lab is about hosts and networks, and a disk that other tests have
left with minutes of writing to do would stall every server for longer than any deadline here.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

from tests.sharedfs.hosts import COMMAND_S, Host, Network, skip_without

SERVER = "server"
DISK_BYTES = 3 << 30
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 4 << 30
"""The disks are sparse: a test fills a fraction of them."""
VOLUME_OPTIONS = {
    "network.ping-timeout": "5",
    "network.remote-dio": "enable",
    "performance.stat-prefetch": "off",
    "performance.quick-read": "off",
    "performance.io-cache": "off",
    "performance.read-ahead": "off",
    "performance.readdir-ahead": "off",
    "performance.open-behind": "off",
    "performance.write-behind": "off",
}
GLUSTER_MOUNT = "attribute-timeout=0,entry-timeout=0,negative-timeout=0"
MOOSE_MOUNT = (
    "mfsattrcacheto=0,mfsentrycacheto=0,mfsdirentrycacheto=0,mfsnegentrycacheto=0,mfscachemode=DIRECT,mfstimeout=20"
)


def wait_for(what: str, ready: object) -> None:
    """Ask until it is true."""
    assert callable(ready)
    deadline = time.monotonic() + COMMAND_S
    while not ready():
        assert time.monotonic() < deadline, f"{what} does not come"
        time.sleep(0.1)


class SharedFileSystem:
    """What both have in common."""

    tools: tuple[str, ...] = ()
    client_program = ""
    heals_s = 60.0
    """Once a fault is over, or a host is lost, everybody reads everything within so long."""

    def __init__(self, folder: Path, clients: tuple[str, ...]) -> None:
        skip_without("mkfs.xfs", "losetup", *self.tools)
        self.folder, self.clients = folder, clients
        self.where = folder / "mnt"
        self.where.mkdir()
        shm = shutil.disk_usage(MEMORY).free if MEMORY.is_dir() else 0
        self.in_memory = shm >= MEMORY_BYTES_MIN
        self.state = MEMORY / f"rewarm-lab-{uuid.uuid4().hex}" if self.in_memory else folder / "state"
        self._stack = ExitStack()
        self.network: Network

    def server_names(self) -> tuple[str, ...]:
        """Hosts that serve."""
        return (SERVER,)

    def __enter__(self) -> SharedFileSystem:
        with ExitStack() as stack:
            self._stack = stack
            self._stack.callback(shutil.rmtree, self.state, ignore_errors=True)
            # Detached last: when the hosts are off, nothing has the disks mounted any more.
            self._disks = stack.enter_context(ExitStack())
            self.network = stack.enter_context(Network((*self.server_names(), *self.clients)))
            self.state.mkdir()
            self.serve()
            for name in self.clients:
                self.mount(self.host(name))
            wait_for("the first write", self._can_write)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, name: str) -> Host:
        """A host by its name."""
        return self.network.hosts[name]

    def disk(self, host: Host, name: str) -> Path:
        """A fresh XFS of its own, mounted in a host."""
        image, where = self.state / f"{name}.img", self.state / name
        where.mkdir()
        with open(image, "wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.xfs", "-q", "-i", "size=512", str(image)], check=True)
        direct = [] if self.in_memory else ["--direct-io=on"]
        attach = ["losetup", "--find", "--show", *direct, str(image)]
        loop = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
        self._disks.callback(self._detach, loop)
        host.run("mount", loop, str(where))
        return where

    @staticmethod
    def _detach(loop: str) -> None:
        wait_for(f"the end of {loop}", lambda: not subprocess.run(["losetup", "-d", loop], check=False).returncode)

    def _can_write(self) -> bool:
        probe = self.where / ".ready"
        return all(
            self.host(name).run("sh", "-c", f"echo x > {probe} && rm {probe} && echo good", check=False) == "good"
            for name in self.clients
        )

    def serve(self) -> None:
        """Start the servers."""
        raise NotImplementedError

    def mount(self, host: Host) -> None:
        """Mount in a client host."""
        raise NotImplementedError

    def stop_server(self) -> None:
        """Kill what serves the data."""
        raise NotImplementedError

    def start_server(self) -> None:
        """Start it again."""
        raise NotImplementedError


class Gluster(SharedFileSystem):
    """One volume of one brick. Two distributed bricks answer ENOENT when one is lost, one brick never does."""

    tools = ("glusterd", "gluster", "mount.glusterfs")
    client_program = "glusterfs"

    def _gluster(self, *words: str, check: bool = True) -> str:
        return self.host(SERVER).run("gluster", "--mode=script", *words, check=check)

    def _private_state(self, host: Host) -> None:
        """State and logs in memory of the host: no volume is ever there from before."""
        script = "for d in /var/log/glusterfs /run /var/lib/glusterd; do mkdir -p $d; mount -t tmpfs t $d; done"
        host.run("sh", "-c", f"{script}; mkdir -p /run/gluster /var/log/glusterfs/bricks")

    def serve(self) -> None:
        server = self.host(SERVER)
        brick = self.disk(server, "brick")
        self._private_state(server)
        server.run("glusterd", "-p", "/run/glusterd.pid")
        wait_for("glusterd", lambda: bool(self._gluster("pool", "list", check=False)))
        self._gluster("volume", "create", "pool", "transport", "tcp", f"{server.address}:{brick}/brick", "force")
        options = [word for option in VOLUME_OPTIONS.items() for word in option]
        self._gluster("volume", "set", "pool", *options)
        self._gluster("volume", "start", "pool")

    def mount(self, host: Host) -> None:
        self._private_state(host)
        volume = f"{self.host(SERVER).address}:/pool"
        host.run("mount", "-t", "glusterfs", "-o", GLUSTER_MOUNT, volume, str(self.where))

    def stop_server(self) -> None:
        assert self.host(SERVER).signal("glusterfsd", signal.SIGKILL)

    def start_server(self) -> None:
        self._gluster("volume", "start", "pool", "force")


class Moose(SharedFileSystem):
    """A master and two chunk servers, two copies of everything."""

    tools = ("mfsmaster", "mfschunkserver", "mfsmount")
    client_program = "mfsmount"
    heals_s = 180.0
    """The master keeps what a lost client was writing locked for two minutes (120 to 131 s were measured), and a read
    that meets the lock is tried again by the client for up to 20 s (`mfstimeout`)."""

    def server_names(self) -> tuple[str, ...]:
        return (SERVER, "chunks1", "chunks2")

    def serve(self) -> None:
        state, server = self.state, self.host(SERVER)
        master = state / "master"
        master.mkdir()
        shutil.copy("/var/lib/mfs/metadata.mfs.empty", master / "metadata.mfs")
        (state / "exports.cfg").write_text("* / rw,alldirs,maproot=0:0\n")
        (state / "topology.cfg").write_text("")
        self._configure("master", EXPORTS_FILENAME=state / "exports.cfg", TOPOLOGY_FILENAME=state / "topology.cfg")
        server.run("mfsmaster", "-c", str(state / "master.cfg"), "start")
        for name in ("chunks1", "chunks2"):
            disk = self.disk(self.host(name), f"{name}.disk")
            (state / name).mkdir()
            (state / f"{name}.hdd").write_text(f"{disk}\n")
            facts = {"HDD_CONF_FILENAME": state / f"{name}.hdd", "MASTER_HOST": server.address}
            self._configure(name, HDD_LEAVE_SPACE_DEFAULT="64MiB", **facts)
            self.host(name).run("mfschunkserver", "-c", str(state / f"{name}.cfg"), "start")

    def _can_write(self) -> bool:
        """Also: two copies, and space.

        A file with one copy, made before both chunk servers were there, refuses writes for a while, and before they
        have told the master of their space everything is full.
        """
        probe, host = self.where / ".copies", self.host(self.clients[0])
        script = f"echo x > {probe}; mfsfileinfo {probe}; rm {probe}"
        if not super()._can_write() or host.run("sh", "-c", script, check=False).count("copy ") != 2:
            return False
        blocks, size = host.run("stat", "-f", "-c", "%a %S", str(self.where)).split()
        return int(blocks) * int(size) > DISK_BYTES // 2

    def _configure(self, name: str, **facts: object) -> None:
        facts |= {"WORKING_USER": "root", "WORKING_GROUP": "root", "DATA_PATH": self.state / name, "LOCK_MEMORY": 0}
        (self.state / f"{name}.cfg").write_text("".join(f"{key} = {value}\n" for key, value in facts.items()))

    def mount(self, host: Host) -> None:
        wait_for(f"the mount in {host.name}", lambda: self._mounted(host))

    def _mounted(self, host: Host) -> bool:
        host.run("mfsmount", "-H", self.host(SERVER).address, "-o", MOOSE_MOUNT, str(self.where), check=False)
        return "fuse" in host.run("stat", "-f", "-c", "%T", str(self.where), check=False)

    def stop_server(self) -> None:
        assert self.host(SERVER).signal("mfsmaster", signal.SIGKILL)

    def start_server(self) -> None:
        self.host(SERVER).run("mfsmaster", "-c", str(self.state / "master.cfg"), "-a", "start")


SYSTEMS = {"glusterfs": Gluster, "moosefs": Moose}
