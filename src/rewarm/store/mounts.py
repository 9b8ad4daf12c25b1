"""What the settings of a shared file system should be for a pool, held against those of its mount.

Reads the mount table, and what GlusterFS and MooseFS tell about themselves in files below the mount. Says what differs
from docs/guides/shared-file-systems.md and why that matters; changes nothing. A setting that cannot be read is said so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rewarm.store.contract import Finding

FILE_BYTES_MAX = 64 << 10
NFS_ATTRIBUTES_S_MAX = 3.0
NFS_DIRECTORY_S_MAX = 3.0
NFS_DEFAULTS = {"acregmax": 60.0, "acdirmax": 60.0}
PING_S_MAX = 10.0

GLUSTER_CACHES = {
    "performance/md-cache": ("performance.stat-prefetch off", "what others append is seen a second late"),
    "performance/quick-read": ("performance.quick-read off", "small reads are answered from a stale copy"),
    "performance/io-cache": ("performance.io-cache off", "reads are answered from a stale copy"),
    "performance/read-ahead": ("performance.read-ahead off", "reads are answered from a stale copy"),
    "performance/open-behind": ("performance.open-behind off", "a file that is gone opens, and fails later"),
    "performance/write-behind": ("performance.write-behind off", "writes are acknowledged before a server has them"),
}
"""Translators of a GlusterFS client that are better not there: the setting, and what it does to a pool."""

GLUSTER_TIMEOUTS = ("attribute-timeout", "entry-timeout", "negative-timeout")
MOOSE_CACHES = ("mfsattrcacheto", "mfsentrycacheto", "mfsdirentrycacheto", "mfsnegentrycacheto")


class Mount(msgspec.Struct, frozen=True):
    """One line of the mount table."""

    filesystem: str
    source: str
    point: Path
    options: dict[str, str]


def mount_of(directory: Path, table: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount that holds a directory; None where the table is not there."""
    try:
        lines = table.read_bytes().splitlines()
        where = os.path.realpath(directory)
    except OSError:
        return None
    found: Mount | None = None
    for line in lines:
        fields = [_unescaped(field) for field in line.split()]
        tail = fields.index("-") + 1
        point = fields[4]
        if where == point or where.startswith(point.rstrip("/") + "/"):
            pairs = (option.partition("=") for option in [*fields[5].split(","), *fields[tail + 2].split(",")])
            mount = Mount(fields[tail], fields[tail + 1], Path(point), {name: value for name, _, value in pairs})
            if found is None or len(point) >= len(str(found.point)):
                found = mount
    return found


def _unescaped(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


def mount_notes(root: Path) -> list[Finding]:
    """What is to be set otherwise for a pool in this directory."""
    mount = mount_of(root)
    if mount is None:
        return []
    return [Finding("mount_setting", str(mount.point), line) for line in _advice(mount)]


def _advice(mount: Mount) -> Iterable[str]:
    if mount.filesystem in ("nfs", "nfs4"):
        return _nfs(mount.options)
    if mount.filesystem == "fuse.glusterfs":
        return _gluster(mount.point / ".meta")
    if mount.filesystem.startswith("fuse") and mount.source.startswith("mfs#"):
        return _moose(mount.point / ".params")
    if mount.options.keys() & {"nobarrier"} or mount.options.get("barrier") == "0":
        return ["mounted without write barriers: a power loss can cost what was synced; mount with barriers"]
    return []


def _nfs(options: Mapping[str, str]) -> Iterable[str]:
    if options.get("lookupcache", "all") == "all" and "noac" not in options:
        yield "set lookupcache=positive: a name looked up before it exists is remembered as missing"
    for name, most_s in (("acregmax", NFS_ATTRIBUTES_S_MAX), ("acdirmax", NFS_DIRECTORY_S_MAX)):
        if "noac" not in options and _number(options.get(name), NFS_DEFAULTS[name]) > most_s:
            yield f"set {name}={most_s:.0f} or less (actimeo=1): what others publish is seen up to {name} seconds late"
    if not options.keys() & {"soft", "softerr"}:
        yield "set softerr,timeo=100,retrans=2: with a hard mount a call on a dead server never ends"


def _gluster(meta: Path) -> Iterable[str]:
    command = _text(meta / "cmdline")
    client = _first(meta.glob("graphs/active/*-client-0"))
    if command is None or client is None:
        yield f"cannot be read: {meta}; compare the settings with the guide to shared file systems"
        return
    words = dict(re.findall(r"--([a-z-]+)=([0-9.]+)", command))
    for name in GLUSTER_TIMEOUTS:
        if _number(words.get(name), 0.0 if name == "negative-timeout" else 1.0) > 0:
            yield f"mount with {name}=0: sizes and names that others have changed are seen late"
    loaded = {_text(kind) for kind in meta.glob("graphs/active/*/type")}
    for kind, (setting, why) in GLUSTER_CACHES.items():
        if kind in loaded:
            yield f"gluster volume set .. {setting}: {why}"
    if _text(client / "options" / "filter-O_DIRECT") not in ("enable", "on"):
        yield "gluster volume set .. network.remote-dio enable: unaligned O_DIRECT and shared mappings are refused"
    if _number(_text(client / "options" / "ping-timeout"), 42.0) > PING_S_MAX:
        yield "gluster volume set .. network.ping-timeout 5: calls on a lost server hang for so long"


def _moose(params: Path) -> Iterable[str]:
    text = _text(params)
    if text is None:
        yield f"cannot be read: {params}; compare the settings with the guide to shared file systems"
        return
    values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    for name in MOOSE_CACHES:
        if _number(values.get(name), 1.0) > 0:
            yield f"mount with {name}=0: sizes and names that others have changed are seen late"
    if values.get("mfscachemode") != "DIRECT":
        yield "mount with mfscachemode=DIRECT: reads are answered from a stale copy, writes before they are sent"
    if _number(values.get("mfstimeout"), 0.0) == 0:
        yield "mount with mfstimeout=20: without it calls on a lost server never end"


def _number(text: str | None, default: float) -> float:
    try:
        return default if text is None else float(text)
    except ValueError:
        return default


def _first(paths: Iterable[Path]) -> Path | None:
    try:
        return next(iter(sorted(paths)), None)
    except OSError:
        return None


def _text(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return None
