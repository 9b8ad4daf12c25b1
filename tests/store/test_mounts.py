"""Advice on mounts: each setting that hurts a pool is named with what to set, and a good mount has no advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewarm.store import mounts
from rewarm.store.mounts import Mount, mount_notes, mount_of

TABLE = """\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 21 0:44 / /mnt/a\\040b rw,relatime shared:5 - nfs4 server:/kv rw,vers=4.2,hard,timeo=600,lookupcache=pos
31 30 0:45 / /mnt/a\\040b/deeper rw - fuse.glusterfs server:/pool rw
32 21 0:46 / /mnt/m rw - fuse mfs\\043server:9421 rw
33 21 0:47 / /mnt/ab rw - xfs /dev/sda1 rw,nobarrier
34 21 0:48 / /mnt/ab ro - tmpfs t rw
"""

GOOD_NFS = {"lookupcache": "pos", "acregmax": "1", "acdirmax": "1", "softerr": "", "timeo": "100"}


@pytest.mark.parametrize(
    ("path", "filesystem", "source"),
    [
        ("/", "ext4", "/dev/root"),
        ("/mnt/a b/kv", "nfs4", "server:/kv"),
        ("/mnt/a b/deeper/kv", "fuse.glusterfs", "server:/pool"),
        ("/mnt/a bc", "ext4", "/dev/root"),
        ("/mnt/m", "fuse", "mfs#server:9421"),
        ("/mnt/ab/x", "tmpfs", "t"),
    ],
)
def test_which_mount_holds_a_directory(tmp_path: Path, path: str, filesystem: str, source: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    mount = mount_of(Path(path), table)
    assert mount
    assert (mount.filesystem, mount.source) == (filesystem, source)
    assert mount_of(Path(path), tmp_path / "none") is None


def advice(monkeypatch: pytest.MonkeyPatch, filesystem: str, options: dict[str, str], point: Path, source: str) -> str:
    monkeypatch.setattr(mounts, "mount_of", lambda _: Mount(filesystem, source, point, options))
    return "\n".join(note.what for note in mount_notes(point))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"lookupcache": "all"}, "lookupcache=positive"),
        ({"lookupcache": "all", "noac": ""}, ""),
        ({"acregmax": "60"}, "acregmax=3 or less"),
        ({"acdirmax": "30"}, "acdirmax=3 or less"),
        ({"softerr": None}, "softerr,timeo=100"),
        ({"softerr": None, "soft": ""}, ""),
    ],
)
def test_nfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, str | None], says: str) -> None:
    options = {name: value for name, value in (GOOD_NFS | change).items() if value is not None}
    found = advice(monkeypatch, "nfs4", options, tmp_path, "server:/kv")
    assert (says in found) if says else not found
    assert found.count("\n") == 0


def test_nfs_as_it_comes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert advice(monkeypatch, "nfs", {"hard": ""}, tmp_path, "server:/kv").count("\n") == 3


def gluster(root: Path, command: str, translators: tuple[str, ...], **options: str) -> None:
    active = root / ".meta" / "graphs" / "active"
    for number, kind in enumerate(("protocol/client", "cluster/distribute", *translators)):
        folder = active / ("pool-client-0" if not number else f"pool-{number}")
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
    (active / "pool-client-0" / "options").mkdir()
    for name, value in options.items():
        (active / "pool-client-0" / "options" / name.replace("__", "-")).write_text(f"{value}\n")
    (root / ".meta" / "cmdline").write_text(f"/usr/sbin/glusterfs {command} --volfile-id=/pool /mnt")


def test_gluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("good", "bad", "hidden"):
        (tmp_path / name).mkdir()
    timeouts = "--attribute-timeout=0 --entry-timeout=0 --negative-timeout=0"
    gluster(tmp_path / "good", timeouts, ("performance/io-threads",), filter__O_DIRECT="enable", ping__timeout="5")
    assert advice(monkeypatch, "fuse.glusterfs", {}, tmp_path / "good", "server:/pool") == ""
    gluster(tmp_path / "bad", "--negative-timeout=2", tuple(mounts.GLUSTER_CACHES), filter__O_DIRECT="disable")
    found = advice(monkeypatch, "fuse.glusterfs", {}, tmp_path / "bad", "server:/pool")
    for word in ("attribute-timeout=0", "entry-timeout=0", "negative-timeout=0", "remote-dio", "ping-timeout 5"):
        assert word in found
    assert found.count("\n") == 4 + len(mounts.GLUSTER_CACHES)
    assert "cannot be read" in advice(monkeypatch, "fuse.glusterfs", {}, tmp_path / "hidden", "server:/pool")


def test_moose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = [f"{name}: 0.000" for name in mounts.MOOSE_CACHES] + ["mfscachemode: DIRECT", "mfstimeout: 20"]
    (tmp_path / ".params").write_text("\n".join(good))
    assert advice(monkeypatch, "fuse", {}, tmp_path, "mfs#server:9421") == ""
    assert advice(monkeypatch, "fuse", {}, tmp_path, "something else") == ""
    bad = [f"{name}: 1.000" for name in mounts.MOOSE_CACHES] + ["mfscachemode: AUTO", "mfstimeout: (not defined)"]
    (tmp_path / ".params").write_text("\n".join(bad))
    found = advice(monkeypatch, "fuse", {}, tmp_path, "mfs#server:9421")
    assert found.count("\n") == 5
    (tmp_path / ".params").unlink()
    assert "cannot be read" in advice(monkeypatch, "fuse", {}, tmp_path, "mfs#server:9421")


def test_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert advice(monkeypatch, "xfs", {"rw": "", "noatime": ""}, tmp_path, "/dev/sda1") == ""
    assert "barriers" in advice(monkeypatch, "xfs", {"nobarrier": ""}, tmp_path, "/dev/sda1")
    assert "barriers" in advice(monkeypatch, "ext4", {"barrier": "0"}, tmp_path, "/dev/sda1")
