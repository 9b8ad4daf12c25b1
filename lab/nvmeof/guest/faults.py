"""Faults of the fabric under a wave of loads: misses within the bound, no wrong byte, and the tier comes back.

Nothing waits for a time of its own: a fault lasts until every reader has met it, and each wait has a bound. What the
store documents (`io_deadline`) is allowed an emulator's delay on top, which grows with what a load takes without fault.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from lab.nvmeof.guest.bench import DEADLINE_S, Bench, expect
from lab.nvmeof.guest.fabric import Controller, Port, Subsystem, make_xfs, mount, ram_drive, run, set_link, until
from lab.nvmeof.guest.peers import Answer, Peer

READERS = 3
BLOCKS = 48
NEW_BLOCKS = 8
SLACK_S = 15.0
"""Two emulated processors are slow to give a verdict that is due."""
SLOWNESS = 10
"""Times what a load takes without fault: a verdict may be late by this instead, where that is more."""
BACK_S = 90.0

Fault = Callable[[], "contextlib.AbstractContextManager[None]"]


def link_down_in_a_wave(bench: Bench, short: bool) -> str:
    """A cable pulled for longer than the deadline of an I/O, and plugged in again."""
    return outage(bench, bench.pool(bench.array, "link"), lambda: link_down("A"), lasting=True)


def controller_reset(bench: Bench, short: bool) -> str:
    """A reset in the middle of a wave: I/O is sent again by the kernel."""
    return outage(bench, bench.pool(bench.array, "reset"), lambda: reset(bench.controller), lasting=False)


def target_killed(bench: Bench, short: bool) -> str:
    """The target's process of an array goes away and comes back."""
    return outage(bench, bench.pool(bench.array, "target"), lambda: _target_away(bench), lasting=True)


def path_gone(bench: Bench, short: bool) -> str:
    """Away for longer than the controller's loss timeout: the device is removed, the file system shut down.

    An administrator connects and mounts again; the process that used the pool goes on with it.
    """
    subsystem = Subsystem("gone", [ram_drive(5)])
    port = Port(8, "tcp", bench.ports["A"].address, 4430)
    port.offer(subsystem)
    loss = {"fast_io_fail_tmo": 2, "ctrl_loss_tmo": 3}
    controller = Controller("A", port, subsystem, **loss)
    place = make_xfs(controller.drives()[0], "/mnt/gone")
    reader = filled(bench, bench.pool(place, "pool"))
    bound_s = bound_of([reader.ask("load", first=0, count=BLOCKS)])
    with link_down("A"):
        lost = reader.ask("load", first=0, count=BLOCKS, timeout_s=bound_s)
        expect(not lost["wrong"] and not lost["hits"], f"under it: {lost}")
        until(lambda: controller.state() == "gone", "the device is removed", BACK_S)
    after = reader.ask("load", first=0, count=BLOCKS, timeout_s=bound_s)
    expect(not after["hits"] and not after["wrong"], f"a removed device answered: {after}")
    run("umount", "-l", str(place))
    again = Controller("A", port, subsystem, **loss)
    # The file system that was shut down lives on below the files that the process holds: same identity, so nouuid.
    mount(again.drives()[0], str(place), options="nouuid")
    back_s = back(reader)
    expect(reader.ask("released", bound_s=BACK_S, timeout_s=2 * BACK_S)["released"], "memory not released")
    reader.ask("close")
    run("umount", "-l", str(place))
    again.disconnect()
    seen = f"{lost['outcomes']} under it, {after['outcomes']} when the device is gone"
    return f"{seen}, all back {back_s:.0f} s after the mount, same process"


def drive_failed(bench: Bench, short: bool) -> str:
    """One drive of a RAID 0 of four: what lay on it is lost, the rest right or a miss."""
    reader = filled(bench, bench.pool(bench.array, "failed"))
    bound_s = bound_of([reader.ask("load", first=0, count=BLOCKS)])
    bench.subsystem.enable(2, on=False)
    try:
        lost = reader.ask("load", first=0, count=BLOCKS, timeout_s=bound_s)
        expect(not lost["wrong"], f"wrong bytes: {lost}")
        expect(lost["hits"] < BLOCKS, "no block lay on the lost drive")
    finally:
        bench.end_case()
        run("umount", "-l", str(bench.array))
        run("mdadm", "--stop", "/dev/md0", check=False)
        bench.subsystem.enable(2, on=True)
    return f"{lost['outcomes']}, none wrong"


@contextlib.contextmanager
def link_down(name: str) -> Iterator[None]:
    """A cable is out."""
    set_link(name, up=False)
    try:
        yield
    finally:
        set_link(name, up=True)


@contextlib.contextmanager
def reset(controller: Controller) -> Iterator[None]:
    controller.reset()
    yield
    until(lambda: controller.state() == "live", f"{controller.name} is live again", BACK_S)


@contextlib.contextmanager
def _target_away(bench: Bench) -> Iterator[None]:
    bench.ports["A"].kill(bench.subsystem)
    try:
        yield
    finally:
        bench.ports["A"].offer(bench.subsystem)


def outage(bench: Bench, url: str, fault: Fault, *, lasting: bool, machine: str = "") -> str:
    """Processes load without end while the fault comes and goes. One that lasts does so until all of them have missed.

    Every load must end within the bound and be right or a miss; afterwards the same processes hit and save again.
    """
    readers = [filled(bench, url, machine)]
    for _ in range(READERS - 1):
        readers.append(bench.peer(machine))
        readers[-1].ask("open", url=url)
        readers[-1].ask("lookup", first=0, count=BLOCKS)
    for reader in readers:
        reader.tell("load_for_ever", first=0, count=BLOCKS)
    usual = [_until_loaded(reader, time.monotonic())[-1] for reader in readers]
    bound_s = bound_of(usual)
    with fault():
        met = [_until_missed(reader, bound_s) for reader in readers] if lasting else []
    mended_s = time.monotonic()
    after = [_until_loaded(reader, mended_s) for reader in readers]
    back_s = time.monotonic() - mended_s
    found = [one for answers in (*met, *after, *(reader.halt() for reader in readers)) for one in answers]
    expect(not any(one["wrong"] for one in found), f"wrong bytes: {found}")
    latest_s = max(one["took_s"] for one in found)
    expect(latest_s < bound_s, f"a verdict after {latest_s:.0f} s, bound {bound_s:.0f}")
    for reader in readers:
        expect(reader.ask("released", bound_s=BACK_S, timeout_s=2 * BACK_S)["released"], "memory not released")
    stored = readers[0].ask("save", first=BLOCKS, count=NEW_BLOCKS, timeout_s=BACK_S)
    expect(len(stored["stored"]) == NEW_BLOCKS, f"saved after the fault: {stored['outcomes']}")
    for reader in readers:
        reader.ask("close", timeout_s=BACK_S)
    misses = sum(one["hits"] < BLOCKS for one in found)
    return (
        f"{misses} of {len(found)} loads missed under it, none wrong, verdicts within {latest_s:.0f} s,"
        f" all back {back_s:.0f} s after it, same processes"
    )


def bound_of(usual: list[Answer]) -> float:
    """Seconds within which a load must have its verdict, by what these took without fault."""
    slowest_s: float = max(one["took_s"] for one in usual)
    return DEADLINE_S + max(SLACK_S, SLOWNESS * slowest_s)


def filled(bench: Bench, url: str, machine: str = "") -> Peer:
    """A process that has saved the blocks, and holds the pool open."""
    peer = bench.peer(machine)
    peer.ask("open", url=url)
    stored = peer.ask("save", first=0, count=BLOCKS)
    expect(len(stored["stored"]) == BLOCKS, f"saved: {stored['outcomes']}")
    return peer


def _until_missed(reader: Peer, bound_s: float) -> list[Answer]:
    """Loads until one has met the fault."""
    deadline_s = time.monotonic() + bound_s
    found: list[Answer] = []
    while not found or found[-1]["hits"] == BLOCKS:
        expect(time.monotonic() < deadline_s, f"the fault was not met within {bound_s:.0f} s")
        found.append(reader.answer(bound_s))
    return found


def _until_loaded(reader: Peer, since_s: float) -> list[Answer]:
    """Loads until one that began after this moment hits all."""
    deadline_s = time.monotonic() + BACK_S
    found: list[Answer] = []
    while not found or found[-1]["hits"] < BLOCKS or found[-1]["began_s"] < since_s:
        expect(time.monotonic() < deadline_s, f"not back within {BACK_S:g} s: {found[-1:]}")
        found.append(reader.answer(BACK_S))
    return found


def back(reader: Peer) -> float:
    """Seconds until every block is a hit again, in the same process. Raises where that does not come."""
    start_s = time.monotonic()
    reader.tell("load_for_ever", first=0, count=BLOCKS)
    found = [*_until_loaded(reader, start_s), *reader.halt()]
    expect(not any(one["wrong"] for one in found), f"wrong bytes: {found}")
    return time.monotonic() - start_s
