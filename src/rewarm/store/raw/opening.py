"""From `block:///dev/..?role=..` to a store: reads the header, becomes the owner where it should, else reads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rewarm.errors import ConfigError, FormatError, PoolInUse, StorageError
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import Choice, choose_for_file
from rewarm.store.layout import PAGE
from rewarm.store.patience import Mount
from rewarm.store.pool import host_id
from rewarm.store.raw.header import HEADER_OFFSETS, Header, newest, other_version
from rewarm.store.raw.lease import NOBODY, Terms
from rewarm.store.raw.media import IO_DEADLINE_S, Media, node_of, resolve, tries_direct
from rewarm.store.raw.owner import Owner
from rewarm.store.raw.sharing import release, share
from rewarm.store.raw.store import RawStore
from rewarm.store.settings import Settings

ROLES = ("auto", "owner", "reader")
Role = Literal["auto", "owner", "reader"]
Wrap = Callable[[Device], Device]


def facts_of(path: str, deadline_s: float = IO_DEADLINE_S) -> Header:
    """The header of a raw pool. Raises `ConfigError`, `FormatError`, `StorageError`."""
    real, block = resolve(path)
    try:
        direct = tries_direct(real, block, deadline_s)
        media = Media(real, writable=False, direct=direct, deadline_s=deadline_s)
        try:
            start = media.read(0, HEADER_OFFSETS[-1] + PAGE).data
            size = media.bytes
        finally:
            media.close()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    header = newest(start)
    if header is None and other_version(start):
        raise FormatError(f"{path} holds a raw pool of another version; this one reads version 1")
    if header is None:
        raise ConfigError(f"{path} holds no raw pool; make one with: rewarm format block://{path}")
    if header.device_bytes > size:
        raise FormatError(f"{path} has {size} bytes, but its pool was made with {header.device_bytes}")
    return header


def open_raw_store(
    path: str,
    settings: Settings,
    namespace: object,
    *,
    role: Role = "auto",
    host: str = "",
    wrap_reads: Wrap = lambda device: device,
    wrap_writes: Wrap = lambda device: device,
) -> RawStore:
    """Open a raw pool. With `auto` the host that formatted it owns it, with `owner` this one, with `reader` none.

    Where somebody else owns it and lives, `auto` opens a reader, and `owner` raises `PoolInUse`.
    """
    deadline_s = settings.io_deadline_s
    header = facts_of(path, deadline_s)
    name = host or host_id()
    choice = _choose(path, settings)

    def become_owner(former: bytes = NOBODY) -> Owner | None:
        real, _ = resolve(path)
        terms = Terms(header.pool_id, node_of(real, name), settings.poll_s, settings.lease_s, settings.poll_s)
        return share(real, terms, direct=choice.direct, deadline_s=deadline_s, former=former)

    def own_again(found: Header, lost: Owner) -> Owner | None:
        """Never from another host, dead or not: to find out takes its lease, and the log must be followed meanwhile."""
        former = lost.header.owner
        free = found.owner in (NOBODY, former) or found.node == node_of(resolve(path)[0], name)
        return become_owner(former) if free else None

    owner: Owner | None = None
    if role == "owner" or (role == "auto" and name == header.home):
        try:
            owner = become_owner()
        except OSError as error:
            if role == "owner":
                raise StorageError(f"{path} cannot be owned: {error.strerror or error}") from error
        if owner is None and role == "owner":
            raise PoolInUse(f"{path} is owned by {facts_of(path).node.split('/')[0] or 'somebody else'}, who lives")
    try:
        media = Media(resolve(path)[0], writable=False, direct=choice.direct, deadline_s=deadline_s)
        return RawStore(
            path,
            media,
            header,
            choice,
            settings,
            namespace,
            owner,
            own_again=own_again,
            wrap_reads=wrap_reads,
            wrap_writes=wrap_writes,
        )
    except (OSError, StorageError) as error:
        if owner:
            release(owner)
        raise StorageError(f"{path} cannot be opened: {error}") from error


def _choose(path: str, settings: Settings) -> Choice:
    """The device that serves a path, tried in a thread of its own: nothing ends a read that hangs."""
    real, block = resolve(path)
    mount = Mount(settings.io_deadline_s)
    try:
        direct = tries_direct(real, block, settings.io_deadline_s)
        return mount.call(lambda: choose_for_file(real, direct=direct, prefer=settings.device))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    finally:
        mount.end()
