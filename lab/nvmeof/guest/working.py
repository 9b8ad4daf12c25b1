"""Cases without faults of the fabric: the kit, killed writers and cold recovery, on the local drive and the array."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

from lab.nvmeof.guest.bench import Bench, expect
from lab.nvmeof.guest.fabric import Controller, Port, Subsystem, make_xfs, ram_drive, run

KIT = "tests/store/test_file_kit.py::TestFileStore"
KIT_SHORT = "another_size or pinned_blocks"
KIT_LIMIT_S = 900
BLOCKS = 24


def array_over_tcp(bench: Bench, short: bool) -> str:
    """Saved by one process, loaded by another."""
    return _saved_and_loaded(bench, bench.array, f"md RAID 0 of {len(bench.controller.drives())}, XFS, TCP")


def array_over_rdma(bench: Bench, short: bool) -> str:
    """The same over soft RoCE."""
    for module in ("rdma_rxe", "rdma_cm", "nvmet-rdma", "nvme-rdma", "dummy"):
        run("modprobe", module)
    run("ip", "link", "add", "rdma0", "type", "dummy")
    run("ip", "addr", "add", "10.91.9.1/24", "dev", "rdma0")
    run("ip", "link", "set", "rdma0", "up")
    run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
    subsystem = Subsystem("rdma", [ram_drive(4)])
    port = Port(9, "rdma", "10.91.9.1", 4421)
    port.offer(subsystem)
    controller = Controller("A", port, subsystem)
    place = make_xfs(controller.drives()[0], "/mnt/rdma")
    seen = _saved_and_loaded(bench, place, "XFS, RDMA over soft RoCE")
    bench.end_case()
    run("umount", str(place))
    controller.disconnect()
    return seen


def kit(bench: Bench, short: bool) -> str:
    """The conformance kit on the array."""
    place = bench.array / "kit"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", KIT, f"--basetemp={place}"]
    if short:
        command += ["-k", KIT_SHORT]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=KIT_LIMIT_S)
    last = found.stdout.strip().splitlines()[-1] if found.stdout.strip() else found.stderr[-200:]
    if found.returncode:
        raise RuntimeError(found.stdout[-2000:] + last)
    return last


def kills(bench: Bench, short: bool) -> str:
    """Ten writers killed: what they had published is there, and right."""
    url = bench.pool(bench.array, "kills")
    chance = random.Random(7)
    published: list[int] = []
    for number in range(10):
        writer = bench.peer()
        writer.ask("open", url=url)
        writer.tell("save_for_ever", first=number * 1000, step=2)
        for _ in range(chance.randint(1, 4)):
            published += writer.answer()["stored"]
        writer.kill()
    reader = bench.peer()
    reader.ask("open", url=url)
    found = reader.ask("load_each", numbers=published)
    expect(not found["wrong"] and found["hits"] == len(published), f"of {len(published)}: {found}")
    return f"{len(published)} blocks published by 10 killed writers, all right"


def cold_recovery(bench: Bench, short: bool) -> str:
    """`rewarm bench` with the local drive beside the array: every read proven cold. Its times mean nothing here."""
    result = Path("/tmp/recovery.json")
    places = {"local": bench.local / "bench", "array": bench.array / "bench"}
    targets = []
    for name, place in places.items():
        place.mkdir()
        targets += ["--target", f"{name}=file://{place}?capacity=96MiB"]
    command = [
        str(Path(sys.executable).with_name("rewarm")), "bench", *targets, "--model", "Qwen3-0.6B", "--tokens", "256",
        "--block-tokens", "64", "--concurrency", "2", "--repeats", "1", "-o", str(result), "-q",
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=dict(os.environ))
    if found.returncode:
        raise RuntimeError(found.stdout[-1000:] + found.stderr[-1000:])
    cells = json.loads(result.read_text())["cells"]
    expect(all(cell["cold"] == "proven" and not cell["misses"] for cell in cells), str(cells)[:300])
    return f"{len(cells)} cells, {sum(cell['hits'] for cell in cells)} hits, cold proven"


def _saved_and_loaded(bench: Bench, place: Path, what: str) -> str:
    url = bench.pool(place, "plain")
    writer, reader = bench.peer(), bench.peer()
    device = writer.ask("open", url=url)["device"]
    reader.ask("open", url=url)
    stored = writer.ask("save", first=0, count=BLOCKS)
    expect(len(stored["stored"]) == BLOCKS, f"saved: {stored['outcomes']}")
    known = reader.ask("lookup", first=0, count=BLOCKS)["known"]
    loaded = reader.ask("load", first=0, count=BLOCKS)
    expect(known == BLOCKS and loaded["hits"] == BLOCKS and not loaded["wrong"], f"{known} known, {loaded}")
    return f"{what}: {BLOCKS} blocks by another process, device {device}"
