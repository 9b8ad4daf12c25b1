"""`rewarm format`: makes a raw pool, and refuses whatever may hold something that somebody wants to keep.

What is looked for: signatures of file systems, partition tables, RAID and volume managers, a raw pool, a mount or any
other exclusive holder of a block device. With `force` a foreign signature, or a raw pool that nobody owns, is
overwritten; a mounted or held device and a living owner are refused always.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import subprocess

import msgspec

from rewarm.errors import ConfigError, FormatError, PoolInUse, StorageError
from rewarm.store.layout import PAGE
from rewarm.store.pool import close_file, host_id
from rewarm.store.raw.header import (
    CLAIM_OFFSET,
    HEADER_OFFSETS,
    LOG_OFFSET,
    Header,
    encode_header,
    newest,
    other_version,
    plan_header,
)
from rewarm.store.raw.lease import NOBODY, is_silent
from rewarm.store.raw.media import Media, node_of, resolve, tries_direct
from rewarm.store.raw.reservations import Reservation

SIGNATURES = (
    (0, b"XFSB", "XFS"),
    (0x438, b"\x53\xef", "ext2, ext3 or ext4"),
    (0x10040, b"_BHRfS_M", "btrfs"),
    (0x218, b"LABELONE", "an LVM physical volume"),
    (0x18, b"LVM2 001", "an LVM physical volume"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a RAID member (md)"),
    (0, b"\xfc\x4e\x2b\xa9", "a RAID member (md)"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"EXFAT   ", "exFAT"),
    (0x36, b"FAT", "FAT"),
    (0x52, b"FAT32", "FAT"),
    (0x400, b"\x10\x20\xf5\xf2", "F2FS"),
    (0xFF6, b"SWAPSPACE2", "swap space"),
    (0x8001, b"CD001", "ISO 9660"),
    (0x10000, b"\x01\x16\x19\x70", "GFS2"),
    (0x2000, b"OCFSV2", "OCFS2"),
    (512, b"EFI PART", "a GPT partition table"),
    (510, b"\x55\xaa", "a partition table"),
)
"""Offset, bytes, name of what is known by its first pages."""

LOOK_BYTES = LOG_OFFSET
BLKID_S = 10.0


class Formatted(msgspec.Struct, frozen=True):
    """What `format` made."""

    path: str
    pool_id: str
    capacity_bytes: int
    slot_bytes: int
    slots: int
    log_bytes: int
    home: str


def format_device(path: str, *, force: bool = False, slot_bytes: int | None = None, host: str = "") -> Formatted:
    """Make a raw pool. Raises `ConfigError`, `FormatError` (foreign content), `PoolInUse`, `StorageError`."""
    real, block = resolve(path)
    _refuse_held(real, block)
    home = host or host_id()
    direct = tries_direct(real, block)
    try:
        media = Media(real, writable=True, direct=direct)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    try:
        old = _look(media, path, home, force=force)
        header = plan_header(media.bytes, secrets.token_bytes(16), home, slot_bytes)
        _write(media, header, old)
    except OSError as error:
        raise StorageError(f"{path} cannot be formatted: {error.strerror or error}") from error
    finally:
        media.close()
    return Formatted(
        real,
        header.pool_id.hex(),
        header.capacity_bytes,
        header.slot_bytes,
        header.slots,
        2 * header.half_bytes,
        home,
    )


def signature_of(start: bytes | memoryview) -> str | None:
    """What the first MiB of a device looks like; None where nothing is known."""
    data = bytes(start)
    return next((name for at, magic, name in SIGNATURES if data[at : at + len(magic)] == magic), None)


def _refuse_held(path: str, block: bool) -> None:
    """Raise `PoolInUse` when a block device is mounted, part of an array, or held by anything else."""
    if not block:
        return
    try:
        close_file(os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise PoolInUse(f"{path} is mounted, part of an array, or held otherwise; it is not formatted") from error
        raise StorageError(f"{path} cannot be opened: {error.strerror}") from error


def _look(media: Media, path: str, host: str, *, force: bool) -> Header | None:
    """Raise unless the device may be overwritten; returns the header of the raw pool that is there, if any."""
    start = media.read(0, min(LOOK_BYTES, media.bytes)).data
    old = newest(start)
    if old is not None:
        _refuse_owned(media, path, old, host)
        if not force:
            raise FormatError(f"{path} holds a raw pool ({old.pool_id.hex()}); add --force to lose what is in it")
        return old
    if force:
        return None
    if other_version(start):
        raise FormatError(f"{path} holds a raw pool of another version; add --force to lose what is in it")
    found = signature_of(start) or _blkid(media.path)
    if found:
        raise FormatError(f"{path} holds {found}; name another device, or add --force to lose what is in it")
    return None


def _refuse_owned(media: Media, path: str, old: Header, host: str) -> None:
    """Raise `PoolInUse` when somebody lives who owns the raw pool."""
    if old.owner == NOBODY:
        return
    alive = not media.lock() if old.node == node_of(media.path, host) else not is_silent(media, old)
    if alive:
        raise PoolInUse(f"{path} holds a raw pool that {old.node.split('/')[0]} owns now; end its owner first")


def _blkid(path: str) -> str | None:
    """What the system's own tool says of a device, where there is one: it knows more than we do."""
    tool = shutil.which("blkid")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "-p", "-o", "export", path], capture_output=True, text=True, timeout=BLKID_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    facts = dict(line.partition("=")[::2] for line in answer.stdout.splitlines())
    return facts.get("TYPE") or (f"a partition table ({facts['PTTYPE']})" if "PTTYPE" in facts else None)


def _write(media: Media, header: Header, old: Header | None) -> None:
    """Clear what could be taken for something, then write the headers: epochs go on where a pool was before."""
    if header.capacity_bytes < header.slot_bytes:
        raise ConfigError("the device is too small")
    if old is not None:
        former = Reservation(media, old.pool_id)  # What a dead owner has left would keep the writes below out.
        former.register()
        former.clear()
    media.write(CLAIM_OFFSET, bytes(PAGE))
    for at in range(CLAIM_OFFSET + PAGE, LOG_OFFSET, 64 << 10):
        media.write(at, bytes(min(64 << 10, LOG_OFFSET - at)))
    if old is not None:
        header = msgspec.structs.replace(header, epoch=old.epoch + 1, counter=old.counter + 1)
    for at in HEADER_OFFSETS:
        media.write(at, encode_header(header))
    media.sync()
