"""Two hosts on one array: what is right (a server of NFS) and what we refuse (a file system mounted twice)."""

from __future__ import annotations

import functools
from pathlib import Path

from lab.nvmeof.guest.bench import Bench, expect
from lab.nvmeof.guest.fabric import Controller, Port, Subsystem, mount, ram_drive, run, until
from lab.nvmeof.guest.peers import BLOCK_BYTES, Peer

ROUNDS = {False: 24, True: 10}
STEP = 8
CAPACITY_MIB = 8
"""Less than half of what the rounds save, and more than the newest of it that is loaded."""
LOADED = 4 * STEP
VISIBLE_S = 60


def nfs_from_one_host(bench: Bench, short: bool) -> str:
    """One host serves its XFS by NFS 4.2; two hosts write and read one pool there, under eviction."""
    _serve_nfs(bench)
    places = {}
    for host in "AB":
        places[host] = Path(f"/mnt/nfs-{host}")
        places[host].mkdir()
        options = "vers=4.2,nosharecache,soft,timeo=50,retrans=2,lookupcache=positive"
        # The helper itself: mount looks for it in the machine's directories only.
        run("mount.nfs4", "127.0.0.1:/", str(places[host]), "-o", options)
    (places["A"] / "pool").mkdir()
    run("touch", str(places["A"] / "ready"), timeout_s=90)  # waits for the end of the server's grace period
    peers = {host: bench.peer(f"host-{host}") for host in "AB"}
    for host, peer in peers.items():
        url = f"file://{places[host]}/pool?capacity={CAPACITY_MIB}MiB&poll=200ms"
        peer.ask("open", url=url)
    seen = verified = 0
    for number in range(ROUNDS[short]):
        writer, reader = (peers["A"], peers["B"]) if number % 2 else (peers["B"], peers["A"])
        first = number * STEP
        stored = writer.ask("save", first=first, count=STEP, timeout_s=90)["stored"]
        expect(stored, "nothing was stored")
        until(functools.partial(_sees, reader, first, len(stored)), "the other host sees what was saved", VISIBLE_S)
        found = reader.ask("load", first=max(first + STEP - LOADED, 0), count=LOADED, timeout_s=90)
        expect(not found["wrong"], f"wrong bytes: {found}")
        seen += len(stored)
        verified += found["hits"]
    used = max(peer.ask("stats")["used"] for peer in peers.values())
    expect(used <= (CAPACITY_MIB + 1) << 20, f"{used} bytes used of {CAPACITY_MIB} MiB")
    oldest = peers["A"].ask("lookup", first=0, count=STEP)["known"]
    expect(not oldest, "nothing was evicted")
    for peer in peers.values():
        peer.ask("close", timeout_s=90)
    for place in places.values():
        run("umount", "-f", str(place))
    run("exportfs", "-ua")
    run("rpc.nfsd", "0", check=False)
    through = f"{seen * BLOCK_BYTES >> 20} MiB through {CAPACITY_MIB}"
    return f"{seen} blocks seen by the other host, {verified} hits verified, {through}"


def _sees(reader: Peer, first: int, count: int) -> bool:
    known: int = reader.ask("lookup", first=first, count=STEP)["known"]
    return known >= count


def _serve_nfs(bench: Bench) -> None:
    (bench.array / "export").mkdir()
    run("mkdir", "-p", "/run/rpcbind", "/var/lib/nfs/rpc_pipefs", "/var/lib/nfs/nfsdcltrack", "/var/lib/nfs/v4recovery")
    for name in ("etab", "rmtab"):
        Path("/var/lib/nfs", name).touch()
    run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd", check=False)
    run("exportfs", "-i", "-o", "rw,fsid=0,no_root_squash,no_subtree_check,insecure,sync", f"*:{bench.array}/export")
    # Else the server waits 90 s for clients of an earlier life.
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        Path("/proc/fs/nfsd", name).write_text("10")
    run("rpc.mountd", "-N", "3", check=False)
    run("rpc.nfsd", "-N", "3", "-V", "4.2", "--no-udp", "4", check=False)
    until(lambda: int(run("cat", "/proc/fs/nfsd/threads")) > 0, "the threads of the NFS server")


def xfs_mounted_twice(bench: Bench, short: bool) -> str:
    """A second host that mounts the same namespace loses data silently: its pool is refused."""
    subsystem = Subsystem("twice", [ram_drive(6)])
    hosts = {}
    for host in "AB":
        port = Port(20 + ord(host), "tcp", bench.ports[host].address, 4440)
        port.offer(subsystem)
        hosts[host] = Controller(host, port, subsystem)
    (here,), (there,) = hosts["A"].drives(), hosts["B"].drives()
    run("mkfs.xfs", "-q", "-f", "-K", here)
    place = mount(here, "/mnt/once")
    host_a, host_b = bench.peer("host-A"), bench.peer("host-B")
    url = bench.pool(place, "pool")
    host_a.ask("open", url=url)
    host_a.ask("save", first=0, count=4)
    host_a.ask("close")
    # What the first host wrote is only in its log until it unmounts.
    run("umount", "/mnt/once")
    mount(here, "/mnt/once")
    host_a.ask("open", url=url)
    mount(there, "/mnt/twice", options="nouuid")
    try:
        host_b.ask("open", url=url.replace("/mnt/once", "/mnt/twice").split("?")[0])
    except RuntimeError as error:
        expect("PoolInUse" in str(error), f"refused for another reason: {error}")
        return f"refused: {error}"[:120]
    finally:
        host_a.ask("close")
        run("umount", "/mnt/twice")
        run("umount", "/mnt/once")
        for controller in hosts.values():
            controller.disconnect()
    raise RuntimeError("a file system mounted by two hosts was opened by both")
