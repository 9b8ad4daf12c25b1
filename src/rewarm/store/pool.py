"""The tree of a pool: its `pool.json`, directories and modes, names, and what it takes on disk.

Everything that makes or lists files of a pool goes through here. A name is never probed: files are found by listing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from rewarm.errors import ConfigError, FormatError, StorageError
from rewarm.store.layout import FORMAT, PAGE
from rewarm.units import SIZE_MAX, format_size

POOL_FILE = "pool.json"
WRITERS = "writers"
NAMESPACES = "namespaces"
ADOPTED = "adopted"
TEMPORARY = ".tmp-"
"""Begins the names of files on their way to another."""
SEGMENT_BYTES_MAX = 256 << 20
SEGMENT_BYTES_MIN = 64 << 10
SEGMENTS_PER_POOL = 64
CAPACITY_BYTES_MIN = SEGMENTS_PER_POOL * SEGMENT_BYTES_MIN
POOL_FILE_BYTES_MAX = 64 << 10

WRITER_NAME = re.compile(r"[0-9a-f]{32}")
NUMBERED = re.compile(r"([0-9]{8})\.(seg|log)")


class PoolFacts(msgspec.Struct, frozen=True):
    """What `pool.json` says."""

    format: int
    pool_id: str
    capacity_bytes: int
    segment_bytes: int
    access: Literal["private", "group"] = "private"
    host: str = ""


class _Version(msgspec.Struct, frozen=True):
    format: int


class OtherFormat(FormatError):
    """A pool of a version that this one does not know: it is left alone, never repaired."""


class FileFacts(msgspec.Struct, frozen=True):
    """One numbered file of a writer: bytes on disk are allocated blocks x 512, time is the server's."""

    writer: str
    name: str
    number: int
    is_segment: bool
    bytes_on_disk: int
    size: int
    modified_s: float


class Names(msgspec.Struct, frozen=True):
    """What a listing of a writer's directory shows: numbers of segments, and of logs in order."""

    segments: set[int]
    logs: list[int]


def segment_bytes_for(capacity: int) -> int:
    """Size at which segments are sealed: min(256 MiB, capacity / 64) in whole pages."""
    return min(SEGMENT_BYTES_MAX, capacity // SEGMENTS_PER_POOL // PAGE * PAGE)


def host_id() -> str:
    """A name for this host that survives a reboot; empty when there is none."""
    try:
        return Path("/etc/machine-id").read_text().strip() or os.uname().nodename
    except OSError:
        return os.uname().nodename


class Pool:
    """One pool directory. Opening reads or makes `pool.json`; nothing else is created before the first save."""

    def __init__(self, root: Path, facts: PoolFacts) -> None:
        self.root = root
        self.facts = facts
        self.writers = root / WRITERS

    @classmethod
    def open(cls, root: Path, *, capacity: int | None, access: Literal["private", "group"] | None) -> Pool:
        """Open a pool; the first time `capacity` is needed, later it must agree or be left out.

        Raises `ConfigError` (missing directory, contradictions), `FormatError` (damaged, foreign version) and
        `StorageError` (no permission, no space, I/O error).
        """
        found = read_facts(root)
        if found is None:
            if capacity is None:
                raise ConfigError(
                    f"{root} holds no pool yet; the first open says how large it may grow: add ?capacity=.."
                )
            found = _create(root, capacity, access or "private")
        if capacity is not None and capacity != found.capacity_bytes:
            raise ConfigError(
                f"{root / POOL_FILE} was made with capacity={found.capacity_bytes} "
                f"({format_size(found.capacity_bytes)}), "
                f"not {capacity} ({format_size(capacity)}); leave capacity out, or use another directory"
            )
        if access is not None and access != found.access:
            raise ConfigError(f"{root / POOL_FILE} was made with access={found.access}, not {access}; leave access out")
        return cls(root, found)

    @property
    def pool_id(self) -> bytes:
        """16 bytes."""
        return bytes.fromhex(self.facts.pool_id)

    @property
    def directory_mode(self) -> int:
        """Mode of directories."""
        return 0o2770 if self.facts.access == "group" else 0o700

    @property
    def file_mode(self) -> int:
        """Mode of files."""
        return 0o660 if self.facts.access == "group" else 0o600

    def make_directory(self, path: Path) -> None:
        """Make a directory with the pool's mode whatever the umask; one that is there already is left as it is.

        Raises `OSError`, also where something else has the name: links are never followed.
        """
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            _expect_directory(path)
            return
        path.chmod(self.directory_mode)

    def create_file(self, path: Path, flags: int) -> int:
        """Create a file that must not exist, with the pool's mode; returns its descriptor (close-on-exec)."""
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, self.file_mode)
        return descriptor

    def note_namespace(self, digest: bytes, description: str) -> None:
        """Keep a readable copy of a namespace; somebody else's copy is as good. Raises `OSError`."""
        self.make_directory(self.root / NAMESPACES)
        path = self.root / NAMESPACES / f"{digest.hex()}.json"
        content = msgspec.json.encode({"digest": digest.hex(), "describe": description})
        publish(path, content, self.file_mode)

    def writer_ids(self) -> list[str]:
        """Names under `writers/` that are writers, in no order; empty before the first save. Raises `OSError`."""
        try:
            _expect_directory(self.writers)
            with os.scandir(self.writers) as entries:
                return [e.name for e in entries if WRITER_NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def names(self, writer: str) -> Names:
        """Names in a writer's directory, without a look at the files; none where it is gone. Raises `OSError`."""
        segments: set[int] = set()
        logs: list[int] = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.writers / writer) as entries:
            for entry in entries:
                match = NUMBERED.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    segments.add(int(match[1])) if match[2] == "seg" else logs.append(int(match[1]))
        return Names(segments, sorted(logs))

    def is_adopted(self, writer: str) -> bool:
        """True when a writer's directory shows the marker of adoption. Raises `OSError`."""
        with os.scandir(self.writers / writer) as entries:
            return any(entry.name == ADOPTED for entry in entries)

    def files(self, writer: str, known: Mapping[str, FileFacts] | None = None) -> list[FileFacts]:
        """Segments and logs of one writer, by number; what vanishes meanwhile is left out.

        Files in `known` are taken as they were: they do not change any more.
        """
        found = []
        try:
            with os.scandir(self.writers / writer) as entries:
                for entry in entries:
                    facts = known.get(entry.name) if known else None
                    facts = facts or _facts_of(writer, entry)
                    if facts:
                        found.append(facts)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda file: (file.is_segment, file.number))

    def adopt(self, writer: str, content: bytes) -> None:
        """Link the marker of adoption into a writer's directory; one that is there already stays. Raises `OSError`."""
        publish(self.writers / writer / ADOPTED, content, self.file_mode, by_way_of=self.root)

    def adoption(self, writer: str) -> bytes:
        """What the marker of adoption says. Raises `OSError`."""
        with open(self.writers / writer / ADOPTED, "rb", opener=open_regular) as file:
            return file.read(PAGE)

    def space(self) -> tuple[int, int]:
        """(free, total) bytes of the file system."""
        facts = os.statvfs(self.root)
        return facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize


def read_facts(root: Path) -> PoolFacts | None:
    """What `pool.json` says, None where there is none. Raises as `Pool.open`."""
    path = root / POOL_FILE
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise ConfigError(f"{root} is not a directory")
        with open(path, "rb", opener=open_regular) as file:
            raw = file.read(POOL_FILE_BYTES_MAX)
    except FileNotFoundError:
        if not root.exists():
            raise ConfigError(f"directory {root} does not exist; create it, or mount the medium there first") from None
        return None
    except NotADirectoryError:
        raise ConfigError(f"{root} does not exist: a part of it is no directory") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return decode_facts(raw, path)


def decode_facts(raw: bytes, path: Path) -> PoolFacts:
    """Parse and check the bytes of a `pool.json`. Raises `FormatError`; `OtherFormat` for another version."""
    try:
        version = msgspec.json.decode(raw, type=_Version).format
        if version != FORMAT:
            raise OtherFormat(f"{path} has format {version}; this version reads format {FORMAT}")
        facts = msgspec.json.decode(raw, type=PoolFacts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{path} is damaged or no pool file ({error}); `rewarm check --fix` rebuilds it from the logs"
        ) from None
    sane = (
        re.fullmatch(r"[0-9a-f]{32}", facts.pool_id)
        and CAPACITY_BYTES_MIN <= facts.capacity_bytes < SIZE_MAX
        and facts.segment_bytes == segment_bytes_for(facts.capacity_bytes)
    )
    if not sane:
        raise FormatError(f"{path} is damaged: impossible values; `rewarm check --fix` rebuilds it from the logs")
    return facts


def encode_facts(facts: PoolFacts) -> bytes:
    """The bytes of a `pool.json`."""
    return msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n"


def replace_facts(root: Path, facts: PoolFacts) -> None:
    """Put a rebuilt `pool.json` in place of a damaged one, which is kept beside it. Raises `StorageError`."""
    path = root / POOL_FILE
    try:
        if path.exists():
            os.rename(path, root / f"{TEMPORARY}{uuid.uuid4().hex}")
    except OSError as error:
        raise StorageError(f"cannot move {path} away: {os.strerror(error.errno or 0)}") from error
    _publish_facts(path, facts)


def change_facts(root: Path, facts: PoolFacts) -> None:
    """Put another `pool.json` in place of a good one, in one step. Raises `StorageError`."""
    fresh = root / f"{TEMPORARY}{uuid.uuid4().hex}"
    _publish_facts(fresh, facts)
    try:
        os.replace(fresh, root / POOL_FILE)
        sync_directory(root)
    except OSError as error:
        raise StorageError(f"cannot change {root / POOL_FILE}: {os.strerror(error.errno or 0)}") from error


def _publish_facts(path: Path, facts: PoolFacts) -> None:
    try:
        publish(path, encode_facts(facts), 0o660 if facts.access == "group" else 0o600)
    except OSError as error:
        raise StorageError(f"cannot create {path}: {os.strerror(error.errno or 0)}") from error


def _create(root: Path, capacity: int, access: Literal["private", "group"]) -> PoolFacts:
    if capacity < CAPACITY_BYTES_MIN:
        raise ConfigError(f"capacity={capacity} is too small; at least {format_size(CAPACITY_BYTES_MIN)}")
    strangers = [name for name in (WRITERS,) if (root / name).exists()]
    if strangers:
        raise FormatError(
            f"{root} has {strangers[0]}/ but no {POOL_FILE}; `rewarm check --fix` rebuilds it from the logs"
        )
    facts = PoolFacts(FORMAT, uuid.uuid4().hex, capacity, segment_bytes_for(capacity), access, host_id())
    _publish_facts(root / POOL_FILE, facts)
    winner = read_facts(root)
    if winner is None:
        raise StorageError(f"{root / POOL_FILE} vanished while it was made")
    return winner


def publish(path: Path, content: bytes, mode: int, *, by_way_of: Path | None = None) -> None:
    """Give `content` a name, whole or not at all; leaves alone what has the name already. Raises `OSError`.

    It is written under a temporary name first, in the same directory or in `by_way_of`.
    """
    temporary = (by_way_of or path.parent) / f"{TEMPORARY}{uuid.uuid4().hex}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(descriptor, mode)
            if os.write(descriptor, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(temporary, path)
    except FileExistsError:
        return
    finally:
        os.unlink(temporary)
    sync_directory(path.parent)


def _expect_directory(path: Path) -> None:
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path} is not a directory")


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power loss; some file systems refuse, and have nothing to sync."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        close_file(descriptor)


def open_regular(path: str | Path, flags: int) -> int:
    """Descriptor of a regular file, close-on-exec; links and special files are refused, none is waited for.

    Raises `OSError`.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        close_file(descriptor)
        raise OSError(errno.ELOOP, "not a regular file")
    return descriptor


def close_file(descriptor: int) -> None:
    """Close a descriptor. A network mount in trouble says so even here; it is closed all the same, and whoever wanted
    to know whether bytes are on the medium has synced before."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _facts_of(writer: str, entry: os.DirEntry[str]) -> FileFacts | None:
    match = NUMBERED.fullmatch(entry.name)
    if not match:
        return None
    try:
        facts = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    on_disk, is_segment = facts.st_blocks * 512, match[2] == "seg"
    return FileFacts(writer, entry.name, int(match[1]), is_segment, on_disk, facts.st_size, facts.st_mtime)
