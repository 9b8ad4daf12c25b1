"""Which medium is under a path: file system, block device, what is behind it, free space.

Promises facts from the kernel's own tables, and None where it does not tell. It does not judge: whether a read can be
proven cold is decided in `cold`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from rewarm.errors import ConfigError, StorageError

_SYS_BLOCK = Path("/sys/dev/block")


class Medium(msgspec.Struct, frozen=True, kw_only=True):
    """What lies under `path`. `device_number` is (major, minor) of the line in /proc/diskstats."""

    path: str
    file_system: str
    source: str
    device: str | None
    device_number: tuple[int, int] | None
    device_model: str | None
    rotational: bool | None
    backing: str | None
    size_bytes: int
    free_bytes: int


def medium_of(path: Path) -> Medium:
    """Describe the medium under an existing `path`. Raises `ConfigError` when it does not exist, `StorageError` when
    the file system does not answer."""
    try:
        number = os.stat(path).st_dev
        space = os.statvfs(path)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no such directory: {path}; create it, or give one on the medium to measure") from None
    except OSError as error:
        raise StorageError(f"cannot look at {path}: {error.strerror}") from error
    file_system, source = _mount_of(path)
    device_number = _block_device(number, source)
    entry = _sys_entry(device_number)
    return Medium(
        path=str(path),
        file_system=file_system,
        source=source,
        device=entry.name if entry else None,
        device_number=device_number if entry else None,
        device_model=_whole_disk_fact(entry, "device/model"),
        rotational=_rotational(entry),
        backing=_whole_disk_fact(entry, "loop/backing_file"),
        size_bytes=space.f_blocks * space.f_frsize,
        free_bytes=space.f_bavail * space.f_frsize,
    )


def medium_of_device(device: Path, size_bytes: int, free_bytes: int) -> Medium:
    """Describe a block device, or the medium under a fixed file that stands for one. Raises as `medium_of`."""
    facts = os.stat(device)
    if not stat.S_ISBLK(facts.st_mode):
        found = medium_of(device)
        return msgspec.structs.replace(found, size_bytes=size_bytes, free_bytes=free_bytes)
    number = (os.major(facts.st_rdev), os.minor(facts.st_rdev))
    entry = _sys_entry(number)
    return Medium(
        path=str(device),
        file_system="raw",
        source=str(device),
        device=device.name,
        device_number=number if entry else None,
        device_model=_whole_disk_fact(entry, "device/model"),
        rotational=_rotational(entry),
        backing=_whole_disk_fact(entry, "loop/backing_file"),
        size_bytes=size_bytes,
        free_bytes=free_bytes,
    )


def _mount_of(path: Path) -> tuple[str, str]:
    """(file system type, source) of the mount that holds `path`; ("unknown", "unknown") where /proc does not tell."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
        mount = next(line.split()[1] for line in facts if line.startswith("mnt_id:"))
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        found = next(line for line in lines if line.split(" ", 1)[0] == mount)
    except (OSError, StopIteration):
        return "unknown", "unknown"
    finally:
        os.close(descriptor)
    file_system, source = found.rpartition(" - ")[2].split(" ")[:2]
    return file_system, _unescape(source)


def _unescape(text: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    for code in (" ", "\t", "\n", "\\"):
        text = text.replace(f"\\{ord(code):03o}", code)
    return text


def _block_device(number: int, source: str) -> tuple[int, int] | None:
    """The block device of a file system: st_dev itself, or the mount's source where st_dev is anonymous (btrfs)."""
    if os.major(number) != 0:
        return os.major(number), os.minor(number)
    try:
        status = os.stat(source)
    except (OSError, ValueError):
        return None
    return (os.major(status.st_rdev), os.minor(status.st_rdev)) if status.st_rdev else None


def _sys_entry(number: tuple[int, int] | None) -> Path | None:
    if number is None:
        return None
    entry = _SYS_BLOCK / f"{number[0]}:{number[1]}"
    return entry.resolve() if entry.exists() else None


def _whole_disk_fact(entry: Path | None, name: str) -> str | None:
    """A fact of a device, or of the disk when the device is a partition of it."""
    for place in (entry, entry.parent) if entry else ():
        try:
            return (place / name).read_text().strip()
        except OSError:
            continue
    return None


def _rotational(entry: Path | None) -> bool | None:
    text = _whole_disk_fact(entry, "queue/rotational")
    return None if text is None else text == "1"
