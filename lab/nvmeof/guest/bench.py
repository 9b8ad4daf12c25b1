"""What the cases share: the target, the array of host A, the local drive, and peers that end with their case."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from lab.nvmeof.guest.fabric import LINKS, Controller, Port, Subsystem, make_array, make_xfs, ram_drive, run, until
from lab.nvmeof.guest.peers import Peer

LOCAL_SERIAL = "local"
DEADLINE_S = 4
"""The pools' io_deadline."""
FAST_IO_FAIL_S = 60
"""Longer than any outage that is meant to end: a file system whose I/O fails shuts itself down."""


class Bench:
    """The fabric, built as it is asked for."""

    def __init__(self) -> None:
        run("mount", "--make-rshared", "/")
        self._peers: list[Peer] = []
        self.subsystem = Subsystem("array", [ram_drive(number) for number in range(4)])
        self.ports = {name: Port(i, "tcp", LINKS[name][1], 4420) for i, name in enumerate(LINKS, start=1)}
        for port in self.ports.values():
            port.offer(self.subsystem)

    @functools.cached_property
    def controller(self) -> Controller:
        """Host A's connection to the array."""
        return Controller("A", self.ports["A"], self.subsystem, fast_io_fail_tmo=FAST_IO_FAIL_S, ctrl_loss_tmo=600)

    @functools.cached_property
    def array(self) -> Path:
        """Host A's XFS on the array of four."""
        return make_xfs(make_array(self.controller.drives()), "/mnt/array")

    @functools.cached_property
    def local(self) -> Path:
        """XFS on the drive inside the host, as the published baseline."""
        for path in Path("/sys/class/nvme").iterdir():
            if (path / "serial").read_text().strip() == LOCAL_SERIAL:
                drive = f"/dev/{path.name}n1"
                until(Path(drive).exists, drive)
                return make_xfs(drive, "/mnt/local")
        raise RuntimeError("the local drive is not there")

    def peer(self, machine: str = "") -> Peer:
        """A process that ends with the case."""
        peer = Peer(machine)
        self._peers.append(peer)
        return peer

    def pool(self, place: Path, name: str) -> str:
        """URL of a fresh pool with the short times of the lab."""
        directory = place / name
        directory.mkdir()
        return f"file://{directory}?capacity=128MiB&io_deadline={DEADLINE_S}s&poll=200ms"

    def end_case(self) -> None:
        """Whatever the case left running."""
        for peer in self._peers:
            with contextlib.suppress(OSError, RuntimeError):
                peer.kill()
        self._peers = []


def expect(holds: object, what: str) -> None:
    """Raises `RuntimeError` saying what was seen instead."""
    if not holds:
        raise RuntimeError(what)
