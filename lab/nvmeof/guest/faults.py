"""Faults of the fabric under a wave of loads: misses within the bound, no wrong byte, and the tier comes back."""

from __future__ import annotations

import time
from collections.abc import Callable

from lab.nvmeof.guest.bench import Bench, expect
from lab.nvmeof.guest.fabric import Controller, Port, Subsystem, make_xfs, mount, run, set_link, until
from lab.nvmeof.guest.peers import Peer

READERS = 3
BLOCKS = 48
DEADLINE_S = 4.0
"""The pools' io_deadline."""
SLACK_S = 15.0
"""Two emulated processors are slow to give a verdict that is due."""
BACK_S = 90.0


def link_down_in_a_wave(bench: Bench, short: bool) -> str:
    """A cable pulled for longer than the deadline of an I/O, and plugged in again."""

    def fault() -> Callable[[], None]:
        set_link("A", up=False)
        return lambda: set_link("A", up=True)

    return _outage(bench, "link", fault, lasting=True)


def controller_reset(bench: Bench, short: bool) -> str:
    """A reset in the middle of a wave: I/O is sent again by the kernel."""

    def fault() -> Callable[[], None]:
        bench.controller.reset()
        return lambda: None

    return _outage(bench, "reset", fault, lasting=False)


def target_killed(bench: Bench, short: bool) -> str:
    """The target's process of an array goes away and comes back."""

    def fault() -> Callable[[], None]:
        bench.ports["A"].kill(bench.subsystem)
        return lambda: bench.ports["A"].offer(bench.subsystem)

    return _outage(bench, "target", fault, lasting=True)


def path_gone(bench: Bench, short: bool) -> str:
    """Away for longer than the controller's loss timeout: the device is removed, the file system shut down.

    An administrator connects and mounts again; the process that used the pool goes on with it.
    """
    subsystem = Subsystem("gone", [5])
    port = Port(8, "tcp", bench.ports["A"].address, 4430)
    port.offer(subsystem)
    loss = {"fast_io_fail_tmo": 2, "ctrl_loss_tmo": 5}
    controller = Controller("A", port, subsystem, **loss)
    place = make_xfs(controller.drives()[0], "/mnt/gone")
    url = bench.pool(place, "pool")
    reader = _filled(bench, url)
    set_link("A", up=False)
    lost = reader.ask("load", first=0, count=BLOCKS, timeout_s=DEADLINE_S + SLACK_S)
    expect(not lost["wrong"], f"wrong bytes: {lost}")
    expect(lost["took_s"] < DEADLINE_S + SLACK_S, f"verdict after {lost['took_s']:.0f} s")
    until(lambda: controller.state() == "gone", "the device is removed", 60)
    set_link("A", up=True)
    after = reader.ask("load", first=0, count=BLOCKS, timeout_s=DEADLINE_S + SLACK_S)
    expect(not after["hits"] and not after["wrong"], f"a removed device answered: {after}")
    run("umount", "-l", str(place))
    again = Controller("A", port, subsystem, **loss)
    # The file system that was shut down lives on below the files that the process holds: same identity, so nouuid.
    mount(again.drives()[0], str(place), options="nouuid")
    back_s = _back(reader)
    reader.ask("close")
    run("umount", "-l", str(place))
    again.disconnect()
    return f"{lost['outcomes']}, all missing while gone, all back {back_s:.0f} s after the mount, same process"


def drive_failed(bench: Bench, short: bool) -> str:
    """One drive of a RAID 0 of four: what lay on it is lost, the rest right or a miss."""
    reader = _filled(bench, bench.pool(bench.array, "failed"))
    bench.subsystem.enable(2, on=False)
    lost = reader.ask("load", first=0, count=BLOCKS, timeout_s=DEADLINE_S + SLACK_S)
    expect(not lost["wrong"], f"wrong bytes: {lost}")
    expect(lost["took_s"] < DEADLINE_S + SLACK_S, f"verdict after {lost['took_s']:.0f} s")
    expect(lost["hits"] < BLOCKS, "no block lay on the lost drive")
    bench.end_case()
    run("umount", "-l", str(bench.array))
    run("mdadm", "--stop", "/dev/md0", check=False)
    bench.subsystem.enable(2, on=True)
    return f"{lost['outcomes']}, none wrong"


def _outage(bench: Bench, name: str, fault: Callable[[], Callable[[], None]], *, lasting: bool) -> str:
    """Loads that are under way when the fault comes, and loads that meet it, must all end within the bound."""
    url = bench.pool(bench.array, name)
    readers = [_filled(bench, url)]
    for _ in range(READERS - 1):
        readers.append(bench.peer())
        readers[-1].ask("open", url=url)
        readers[-1].ask("lookup", first=0, count=BLOCKS)
    readers[0].tell("load", first=0, count=BLOCKS)
    mend = fault()
    for reader in readers[1:]:
        reader.tell("load", first=0, count=BLOCKS)
    if lasting:
        time.sleep(DEADLINE_S * 2)
    mend()
    found = [reader.answer(BACK_S) for reader in readers]
    expect(not sum(one["wrong"] for one in found), f"wrong bytes: {found}")
    expect(all(one["took_s"] < DEADLINE_S + SLACK_S for one in found), f"verdicts too late: {found}")
    expect(all(one["released"] for one in found), f"memory not released: {found}")
    if lasting:
        expect(all(one["hits"] < BLOCKS for one in found[1:]), f"the fault was not met: {found}")
    back_s = max(_back(reader) for reader in readers)
    for reader in readers:
        reader.ask("close")
    hits, latest_s = sum(one["hits"] for one in found), max(one["took_s"] for one in found)
    return (
        f"{hits} of {READERS * BLOCKS} hits under it, none wrong, verdicts within {latest_s:.0f} s,"
        f" all back {back_s:.0f} s after it, same processes"
    )


def _filled(bench: Bench, url: str) -> Peer:
    """A process that has saved the blocks, and holds the pool open."""
    peer = bench.peer()
    peer.ask("open", url=url)
    stored = peer.ask("save", first=0, count=BLOCKS)
    expect(len(stored["stored"]) == BLOCKS, f"saved: {stored['outcomes']}")
    return peer


def _back(reader: Peer) -> float:
    """Seconds until every block is a hit again, in the same process. Raises where that does not come."""
    start_s = time.monotonic()
    while True:
        reader.ask("lookup", first=0, count=1, timeout_s=BACK_S)
        found = reader.ask("load", first=0, count=BLOCKS, timeout_s=BACK_S)
        expect(not found["wrong"], f"wrong bytes: {found}")
        if found["hits"] == BLOCKS:
            return time.monotonic() - start_s
        expect(time.monotonic() - start_s < BACK_S, f"not back within {BACK_S:g} s: {found['outcomes']}")
        time.sleep(0.5)
