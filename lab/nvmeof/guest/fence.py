"""Reservations as a fence. The NVMe target of this kernel has none (before Linux 6.13), its SCSI target has.

So this one case lies on SCSI: one device of the kernel's target, attached twice as to two hosts. What Rewarm asks is
the same, the kernel's ioctls for persistent reservations; how the NVMe driver sends them is not tried here.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from lab.nvmeof.guest.bench import DEADLINE_S, Bench, expect
from lab.nvmeof.guest.fabric import run, small_drive, until
from lab.nvmeof.guest.faults import BLOCKS, NEW_BLOCKS, filled

TARGET = Path("/sys/kernel/config/target")
DRIVE_BYTES = 64 << 20
LEASE_S = 15
UNUSED = 512 << 10
"""An offset that a raw pool leaves alone."""


def late_owner_is_kept_out(bench: Bench, short: bool) -> str:
    """A stopped owner is replaced by the other host: from then on the target refuses what its host writes."""
    devices = _attached()
    options = f"poll=500ms&lease={LEASE_S}s&io_deadline={DEADLINE_S}s"
    bench.peer("host-A").ask("format", device=devices["A"])
    owner = filled(bench, f"block://{devices['A']}?{options}", "host-A")
    notes = owner.ask("stats")["notes"]
    expect(not notes, f"no fence: {notes}")
    expect(_writes(devices["A"]), "the owner's host cannot write")
    expect(not _writes(devices["B"]), "a host without a key can write")
    reader = bench.peer("host-B")
    reader.ask("open", url=f"block://{devices['B']}?{options}&role=reader")
    expect(reader.ask("load", first=0, count=BLOCKS)["hits"] == BLOCKS, "the other host cannot read")
    owner.stop()
    heir = bench.peer("host-B")
    heir.ask("open", url=f"block://{devices['B']}?{options}&role=owner", timeout_s=120)
    expect(len(heir.ask("save", first=BLOCKS, count=NEW_BLOCKS)["stored"]) == NEW_BLOCKS, "the heir cannot save")
    expect(not _writes(devices["A"]), "the former owner's host can still write")
    expect(_writes(devices["B"]), "the heir's host cannot write")
    owner.go_on()
    late = owner.ask("save", first=2 * BLOCKS, count=NEW_BLOCKS)
    expect(not late["stored"], f"a late owner saved: {late}")
    found = heir.ask("load", first=0, count=BLOCKS + NEW_BLOCKS)
    expect(found["hits"] == BLOCKS + NEW_BLOCKS and not found["wrong"], f"afterwards: {found}")
    heir.ask("close", timeout_s=90)
    expect(_writes(devices["A"]), "the reservation outlives its owner's goodbye")
    return f"SCSI: a late owner's host is refused ({late['outcomes']}), {found['hits']} blocks of owner and heir right"


def _attached() -> dict[str, str]:
    """One device of the kernel's target, attached to two initiators: the device file of each host."""
    for module in ("sd_mod", "target_core_mod", "target_core_file", "tcm_loop"):
        run("modprobe", module)
    store = TARGET / "core" / "fileio_0" / "fence"
    store.mkdir(parents=True)
    drive = small_drive("fence", DRIVE_BYTES)
    (store / "control").write_text(f"fd_dev_name={drive},fd_dev_size={DRIVE_BYTES}")
    (store / "wwn" / "vpd_unit_serial").write_text("rewarm-fence")
    (store / "enable").write_text("1")
    return {host: _attach(store, number) for number, host in enumerate("AB", start=1)}


def _attach(store: Path, number: int) -> str:
    group = TARGET / "loopback" / f"naa.600140500000000{number}" / "tpgt_1"
    group.mkdir(parents=True)
    (group / "nexus").write_text(f"naa.600140500000010{number}")
    unit = group / "lun" / "lun_0"
    unit.mkdir()
    (unit / "store").symlink_to(store)
    disks = Path("/sys/class/scsi_device") / f"{(group / 'address').read_text().strip()}:0" / "device" / "block"
    until(lambda: disks.exists() and list(disks.iterdir()), f"the disk of initiator {number}")
    return f"/dev/{next(disks.iterdir()).name}"


def _writes(device: str) -> bool:
    """True when a host may write; False where the target refuses it as reserved. Raises any other `OSError`."""
    descriptor = os.open(device, os.O_RDWR | os.O_DIRECT)
    page = mmap.mmap(-1, 4096)
    try:
        os.preadv(descriptor, [page], UNUSED)
        os.pwritev(descriptor, [page], UNUSED)
    except OSError as error:
        if error.errno != errno.EBADE:
            raise
        return False
    finally:
        os.close(descriptor)
    return True
