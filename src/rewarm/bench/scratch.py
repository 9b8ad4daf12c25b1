"""A directory of the run's own: everything that a run writes lies in it, and it goes away with the run.

The user's own files beside it are never touched. A run that was killed leaves its directory behind; the next run in
the same place finds it by its unlocked lock file and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from rewarm.errors import ConfigError, StorageError
from rewarm.units import format_size

PREFIX = "rewarm-run-"
_LOCK = ".lock"


class Scratch:
    """A fresh directory under `parent`, removed on exit whatever ended the run; `tell` hears what was removed.

    Raises `ConfigError` when `parent` is no directory, `StorageError` when nothing can be written there.
    """

    def __init__(self, parent: Path, tell: Callable[[str], None]) -> None:
        self._parent = parent
        self._tell = tell
        self._lock = -1
        self.path = parent / f"{PREFIX}{secrets.token_hex(6)}"

    def __enter__(self) -> Self:
        if self._parent.exists() and not self._parent.is_dir():
            raise ConfigError(
                f"{self._parent} is no directory; a raw pool there is named block://{self._parent.absolute()}"
            )
        if not self._parent.is_dir():
            raise ConfigError(f"no such directory: {self._parent}; create it, or give one on the medium to measure")
        try:
            for path in sweep(self._parent):
                self._tell(f"removed {path}, left behind by a run that was killed")
            self.path.mkdir(mode=0o700)
            self._lock = _take_lock(self.path)
        except OSError as error:
            raise StorageError(f"cannot write in {self._parent}: {error.strerror}") from error
        finally:
            if self._lock < 0:  # refused, or interrupted half way
                self.remove()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory and all that is in it; harmless when it is gone."""
        try:
            self._remove()
        except KeyboardInterrupt:  # the run was over, and this the first interruption: the next ones wait for us
            self._remove()
            raise

    def _remove(self) -> None:
        size = bytes_under(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            left = self.path.exists()
            self._tell(f"could not remove {self.path}" if left else f"removed {self.path} ({format_size(size)})")
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove what killed runs of this user left in `parent`; return what was removed."""
    removed = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        if _abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def bytes_under(path: Path) -> int:
    """Bytes allocated by the files under `path`, as du counts them."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def _take_lock(path: Path) -> int:
    """Lock the directory for the life of this process. The lock file gets its name when it is locked already, so that
    no other run ever sees it free."""
    fresh = path / f"{_LOCK}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: no name, and no run will ever sweep it
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(path / _LOCK)
    return descriptor


def _abandoned(path: Path) -> bool:
    try:
        if path.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no lock yet: a run that is just starting
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
