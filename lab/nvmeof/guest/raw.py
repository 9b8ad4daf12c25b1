"""Raw pools: every host owns a namespace of the array, and reads those of the others without a file system between."""

from __future__ import annotations

import functools
from pathlib import Path
from urllib.parse import quote

from lab.nvmeof.guest.bench import DEADLINE_S, FAST_IO_FAIL_S, Bench, expect
from lab.nvmeof.guest.fabric import Controller, Port, Subsystem, small_drive, until
from lab.nvmeof.guest.faults import BACK_S, BLOCKS, NEW_BLOCKS, back, bound_of, filled, link_down, outage, reset
from lab.nvmeof.guest.hosts import ASKED_MIN, LATE_S
from lab.nvmeof.guest.peers import BLOCK_BYTES

DRIVE_BYTES = {"A": 12 << 20, "B": 12 << 20, "faults": 64 << 20}
"""Those that two hosts share are soon full, whatever an emulator can do."""
POLL_S = 0.5
SHARING_S = {False: 180, True: 30}
FIRST = {"A": 10**9, "B": 2 * 10**9}
"""Number of each host's first block."""
HITS_MIN = 0.95
END_S = 60
"""What the last turn of two emulated hosts may take."""


@functools.cache
def _controllers(bench: Bench) -> dict[str, Controller]:
    """Each host's connection to the same three namespaces: that of A, that of B, and one of A for faults."""
    subsystem = Subsystem("raw", [small_drive(f"raw-{name}", size) for name, size in DRIVE_BYTES.items()])
    controllers = {}
    for number, host in enumerate("AB", start=30):
        port = Port(number, "tcp", bench.ports[host].address, 4450)
        port.offer(subsystem)
        controllers[host] = Controller(host, port, subsystem, fast_io_fail_tmo=FAST_IO_FAIL_S, ctrl_loss_tmo=600)
    return controllers


def two_hosts(bench: Bench, short: bool) -> str:
    """Each host saves to its own namespace and loads what the other saves, both under eviction all the time."""
    peers = {host: bench.peer(f"host-{host}") for host in "AB"}
    for (host, peer), own in zip(peers.items(), (0, 1), strict=True):
        peer.ask("format", device=_controllers(bench)[host].drives()[own])
    for host, peer in peers.items():
        drives = "&".join(
            f"drive={quote(f'block://{drive}', safe=':/')}" for drive in _controllers(bench)[host].drives()[:2]
        )
        peer.ask("open", url=f"pool:?{drives}&poll={POLL_S * 1000:.0f}ms", timeout_s=120)
    seconds = SHARING_S[short]
    for host, other in ("AB", "BA"):
        peers[host].tell("share", mine=FIRST[host], theirs=FIRST[other], seconds=seconds, visible_s=2 * POLL_S)
    found = [peer.answer(seconds + LATE_S + END_S) for peer in peers.values()]
    saved, asked, hits, announced = (
        sum(one[what] for one in found) for what in ("saved", "asked", "hits", "announced")
    )
    expect(not any(one["wrong"] for one in found), f"wrong bytes: {found}")
    expect(all(one["asked"] >= ASKED_MIN and one["announced"] for one in found), f"too little was seen: {found}")
    expect(all(one["hits"] >= HITS_MIN * one["asked"] for one in found), f"too few hits: {found}")
    for peer in peers.values():
        peer.ask("close", timeout_s=90)
    return (
        f"{hits} of {asked} loads of the other's blocks hit, none wrong, {saved * BLOCK_BYTES >> 20} MiB saved"
        f" through {DRIVE_BYTES['A'] + DRIVE_BYTES['B'] >> 20}, {announced} seen evicted, {seconds} s"
    )


def gone(bench: Bench, short: bool) -> str:
    """Away for longer than the controllers' loss timeout: both hosts lose the device, connect again, and go on.

    While it is away every verb ends within its bound. The processes that owned and read the pool do both again without
    a restart, as soon as the link that names the device leads to where it is now.
    """
    subsystem = Subsystem("raw-gone", [small_drive("raw-gone", DRIVE_BYTES["faults"])])
    ports = {host: Port(number, "tcp", bench.ports[host].address, 4460) for number, host in enumerate("AB", start=40)}
    for port in ports.values():
        port.offer(subsystem)
    controllers = {host: _connect(host, port, subsystem) for host, port in ports.items()}
    urls = {host: f"block://{_link(host)}?poll={POLL_S * 1000:.0f}ms&io_deadline={DEADLINE_S}s" for host in "AB"}
    bench.peer("host-A").ask("format", device=str(_link("A")))
    owner = filled(bench, urls["A"], "host-A")
    notes = owner.ask("stats")["notes"]
    expect(any("no fence" in note for note in notes), f"this kernel's NVMe target takes no reservations: {notes}")
    reader = bench.peer("host-B")
    reader.ask("open", url=urls["B"])
    peers = (owner, reader)
    bound_s = bound_of([peer.ask("load", first=0, count=BLOCKS) for peer in peers])
    with link_down("A"), link_down("B"):
        lost = [peer.ask("load", first=0, count=BLOCKS, timeout_s=bound_s) for peer in peers]
        expect(not any(one["wrong"] or one["hits"] for one in lost), f"under it: {lost}")
        saved = owner.ask("save", first=BLOCKS, count=NEW_BLOCKS, timeout_s=2 * bound_s)
        expect(not saved["stored"], f"saved to nowhere: {saved}")
        verbs = {what: owner.ask("verb", name=what, timeout_s=2 * bound_s) for what in ("refresh", "check", "flush")}
        verbs["open"] = reader.ask("open_another", url=urls["B"], timeout_s=2 * bound_s)
        expect(all(one["refused"] for one in verbs.values()), f"a verb was answered by nothing: {verbs}")
        latest_s = max(one["took_s"] for one in verbs.values())
        expect(latest_s < bound_s, f"a verb took {latest_s:.0f} s, bound {bound_s:.0f}: {verbs}")
        for controller in controllers.values():
            until(lambda controller=controller: controller.state() == "gone", "the device is removed", BACK_S)
    controllers = {host: _connect(host, port, subsystem) for host, port in ports.items()}
    back_s = max(back(peer) for peer in peers)
    until(lambda: owner.ask("save", first=BLOCKS, count=NEW_BLOCKS)["stored"], "the owner saves again", BACK_S)
    until(lambda: reader.ask("lookup", first=BLOCKS, count=NEW_BLOCKS)["known"] == NEW_BLOCKS, "the reader sees it")
    found = reader.ask("load", first=0, count=BLOCKS + NEW_BLOCKS)
    expect(found["hits"] == BLOCKS + NEW_BLOCKS and not found["wrong"], f"afterwards: {found}")
    for peer in peers:
        expect(peer.ask("released", bound_s=BACK_S, timeout_s=2 * BACK_S)["released"], "memory not released")
        peer.ask("close", timeout_s=90)
    for controller in controllers.values():
        controller.disconnect()
    return (
        f"{lost[0]['outcomes']} under it, verbs within {latest_s:.0f} s; device removed and connected again, all back"
        f" {back_s:.0f} s later, saved and seen by the other host, same processes"
    )


def _link(host: str) -> Path:
    """What /dev/disk/by-id would be: this guest runs no udev."""
    return Path(f"/run/raw-gone-{host}")


def _connect(host: str, port: Port, subsystem: Subsystem) -> Controller:
    """Connect, and have the link lead to the device."""
    controller = Controller(host, port, subsystem, fast_io_fail_tmo=2, ctrl_loss_tmo=3)
    link = _link(host)
    link.unlink(missing_ok=True)
    link.symlink_to(controller.drives()[0])
    return controller


def faults(bench: Bench, short: bool) -> str:
    """A link down and a controller reset under a wave of loads from a raw pool."""
    controller = _controllers(bench)["A"]
    device = controller.drives()[2]
    bench.peer("host-A").ask("format", device=device)
    url = f"block://{device}?poll={POLL_S * 1000:.0f}ms&io_deadline={DEADLINE_S}s"
    down = outage(bench, url, lambda: link_down("A"), lasting=True, machine="host-A")
    bench.end_case()
    again = outage(bench, url, lambda: reset(controller), lasting=False, machine="host-A")
    return f"link down: {down}; reset: {again}"
