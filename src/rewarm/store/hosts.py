"""May another host have this file system mounted too? XFS, ext4 and their like are destroyed by that, silently.

A file system that is made for one host keeps its own idea of what is free: two hosts that mount it from one array write
over each other's files. The mount itself is the damage, so a pool is refused that another host has made when the device
below it can be attached to several. What cannot be told (a disk that a hypervisor lends to two guests) is not refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rewarm.errors import PoolInUse
from rewarm.store.contract import Finding
from rewarm.store.devices.medium import MEMORY_FILESYSTEMS, NETWORK_FILESYSTEMS, filesystem_type
from rewarm.store.pool import PoolFacts, change_facts, host_id

CLUSTER_FILESYSTEMS = frozenset({"gfs2", "ocfs2"})
"""On a block device, and made for several hosts."""

FABRICS = {
    "nvme-fabrics": "NVMe over fabrics",
    "/session": "iSCSI",
    "/rport-": "Fibre Channel",
    "/rbd": "RBD",
    "/nbd": "NBD",
    "/drbd": "DRBD",
}
"""Parts of a device's path in sysfs that say how it is attached."""

TRANSPORTS = {"tcp": "NVMe/TCP", "rdma": "NVMe/RDMA", "fc": "NVMe/FC"}
DEPTH_MAX = 8
"""Of devices made of devices; the kernel allows less."""

SYSFS = Path("/sys")


def shared_attachment(root: Path, *, sysfs: Path = SYSFS) -> str | None:
    """How the device below a directory may reach other hosts too, as words for people; None where it cannot.

    None as well for network and cluster file systems, which are made for it, and where nothing can be told.
    """
    kind = filesystem_type(str(root))
    if kind in NETWORK_FILESYSTEMS | MEMORY_FILESYSTEMS | CLUSTER_FILESYSTEMS or kind.startswith("fuse."):
        return None
    number = os.stat(root).st_dev
    return _attachment(sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}", DEPTH_MAX)


def _attachment(device: Path, depth: int) -> str | None:
    """How one block device is attached, or any that it is made of: partitions, mapped devices, arrays of disks."""
    try:
        path = os.path.realpath(device, strict=True)
    except OSError:
        return None
    words = next((words for part, words in FABRICS.items() if part in path), None) or _nvme_transport(Path(path))
    if words or not depth:
        return words
    found = (_attachment(below, depth - 1) for below in sorted(Path(path).glob("slaves/*")))
    return next((words for words in found if words), None)


def _nvme_transport(path: Path) -> str | None:
    """The transport of an NVMe disk: of its controller, or with multipath of any controller of its subsystem."""
    for folder in (path, *path.parents[:3]):
        for file in (folder / "transport", *sorted(folder.glob("nvme*/transport"))):
            try:
                words = TRANSPORTS.get(file.read_text().strip())
            except OSError:
                continue
            if words:
                return words
    return None


def refuse_second_host(root: Path, facts: PoolFacts, *, sysfs: Path = SYSFS) -> None:
    """Raise `PoolInUse` when another host has made the pool and may have its file system mounted now."""
    if not facts.host or facts.host == host_id():
        return
    attachment = shared_attachment(root, sysfs=sysfs)
    if attachment:
        raise PoolInUse(
            f"{root} lies on {filesystem_type(str(root))} over {attachment}, and its pool was made by host "
            f"{facts.host}, not by this one ({host_id()}). Two hosts that mount such a file system at once destroy it. "
            f"Unmount it there for good, then let this host have it: rewarm check {root} --takeover"
        )


def take_over(root: Path, facts: PoolFacts) -> bool:
    """Let this host have a pool that another has made; False where it is this host's already. Raises `StorageError`."""
    if facts.host == host_id():
        return False
    change_facts(root, msgspec.structs.replace(facts, host=host_id()))
    return True


def attachment_notes(root: Path) -> list[Finding]:
    """A warning for `check`: the file system of a pool may be mounted by two hosts."""
    attachment = shared_attachment(root)
    if not attachment:
        return []
    what = f"{filesystem_type(str(root))} over {attachment}: it is destroyed if two hosts ever mount it at once"
    return [Finding("shared_device", ".", what)]
