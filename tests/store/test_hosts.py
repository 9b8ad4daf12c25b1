"""One file system for one host: which devices may be shared, who is refused, and how a pool changes hands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.store.test_tailing import load, open_pool, save

from rewarm.cli import main
from rewarm.errors import PoolInUse
from rewarm.store import hosts
from rewarm.store.contract import Outcome
from rewarm.store.hosts import shared_attachment
from rewarm.store.pool import Pool, read_facts
from rewarm.testing import make_keys

PCI = "devices/pci0000:00/0000:00:02.0"


def fake(sysfs: Path, path: str, *, transport: tuple[str, str] | None = None, slaves: tuple[Path, ...] = ()) -> Path:
    """A block device of a sysfs made for the test."""
    device = sysfs / path
    device.mkdir(parents=True)
    if transport:
        (device / transport[0]).parent.mkdir(parents=True, exist_ok=True)
        (device / transport[0]).write_text(transport[1] + "\n")
    for slave in slaves:
        (device / "slaves").mkdir(exist_ok=True)
        (device / "slaves" / slave.name).symlink_to(slave)
    return device


@pytest.mark.parametrize(
    ("path", "transport", "says"),
    [
        (f"{PCI}/virtio1/block/vda", None, None),
        (f"{PCI}/ata1/host0/target0:0:0/0:0:0:0/block/sda/sda1", None, None),
        (f"{PCI}/nvme/nvme0/nvme0n1", ("../transport", "pcie"), None),
        ("devices/virtual/block/loop3", None, None),
        ("devices/virtual/nvme-fabrics/ctl/nvme1/nvme1n1", None, "NVMe over fabrics"),
        ("devices/virtual/nvme-subsystem/nvme-subsys1/nvme1n1", ("../nvme1/transport", "rdma"), "NVMe/RDMA"),
        ("devices/virtual/nvme-subsystem/nvme-subsys1/nvme1n1/nvme1n1p2", ("../../nvme1/transport", "tcp"), "NVMe/TCP"),
        ("devices/virtual/nvme-subsystem/nvme-subsys2/nvme2n1", ("../nvme2/transport", "pcie"), None),
        ("devices/platform/host3/session1/target3:0:0/3:0:0:1/block/sdb", None, "iSCSI"),
        (f"{PCI}/host4/rport-4:0-2/target4:0:0/4:0:0:1/block/sdc", None, "Fibre Channel"),
        ("devices/rbd/0/block/rbd0", None, "RBD"),
        ("devices/virtual/block/drbd1", None, "DRBD"),
    ],
)
def test_how_a_device_is_attached(
    tmp_path: Path, path: str, transport: tuple[str, str] | None, says: str | None
) -> None:
    device = fake(tmp_path, path, transport=transport)
    assert hosts._attachment(device, hosts.DEPTH_MAX) == says


def test_mapped_devices_are_as_shared_as_what_they_are_made_of(tmp_path: Path) -> None:
    local = fake(tmp_path, f"{PCI}/virtio1/block/vda")
    remote = fake(tmp_path, "devices/platform/host3/session1/block/sdb")
    stripe = fake(tmp_path, "devices/virtual/block/md0", slaves=(local, remote))
    crypt = fake(tmp_path, "devices/virtual/block/dm-0", slaves=(stripe,))
    assert hosts._attachment(crypt, hosts.DEPTH_MAX) == "iSCSI"
    assert hosts._attachment(fake(tmp_path, "devices/virtual/block/dm-1", slaves=(local,)), hosts.DEPTH_MAX) is None
    (crypt / "slaves" / "round").symlink_to(crypt)
    assert hosts._attachment(crypt, hosts.DEPTH_MAX) == "iSCSI"


def test_what_is_made_for_several_hosts_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> str:
        raise AssertionError("not looked at")

    monkeypatch.setattr(hosts, "_attachment", never)
    for kind in ("nfs4", "fuse.glusterfs", "gfs2", "tmpfs", "ceph"):
        monkeypatch.setattr(hosts, "filesystem_type", lambda _, kind=kind: kind)
        assert shared_attachment(tmp_path) is None


def test_the_second_host_is_refused_until_it_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(3)
    with open_pool(tmp_path) as store:
        save(store, keys)
        assert not [note for note in store.check().notes if note.kind == "shared_device"]
    monkeypatch.setattr(hosts, "shared_attachment", lambda *_, **__: "NVMe/TCP")
    with open_pool(tmp_path) as store:
        assert [note.kind for note in store.check().notes] == ["shared_device"]
    facts = read_facts(tmp_path)
    assert facts
    first = facts.host
    monkeypatch.setattr(hosts, "host_id", lambda: "the second")
    with pytest.raises(PoolInUse, match=rf"over NVMe/TCP, .* made by host {first}, .* check .* --takeover"):
        open_pool(tmp_path)
    run = CliRunner().invoke(main, ["check", str(tmp_path), "--json"], prog_name="rewarm")
    assert (run.exit_code, "--takeover" in run.stderr) == (2, True)
    run = CliRunner().invoke(main, ["check", str(tmp_path), "--takeover", "--json"], prog_name="rewarm")
    assert run.exit_code == 0, run.stderr
    report = json.loads(run.stdout)
    assert [(found["kind"], found["fixed"]) for found in report["findings"]] == [("other_host", True)]
    with open_pool(tmp_path) as store:
        assert load(store, keys) == [Outcome.HIT] * 3
    assert Pool.open(tmp_path, capacity=None, access=None).facts.host == "the second"
    monkeypatch.setattr(hosts, "host_id", lambda: first)
    with pytest.raises(PoolInUse, match="made by host the second"):
        open_pool(tmp_path)


def test_the_command_removes_strangers_only_when_told(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        save(store, make_keys(1))
    (tmp_path / "notes.txt").write_text("mine")
    for flags in ([], ["--fix"]):
        run = CliRunner().invoke(main, ["check", str(tmp_path), "--json", *flags], prog_name="rewarm")
        assert run.exit_code == 0
        assert [note["where"] for note in json.loads(run.stdout)["notes"]] == ["notes.txt"]
    run = CliRunner().invoke(main, ["check", str(tmp_path), "--json", "--remove-unknown"], prog_name="rewarm")
    assert run.exit_code == 0
    assert [found["fixed"] for found in json.loads(run.stdout)["findings"]] == [True]
    assert not (tmp_path / "notes.txt").exists()
