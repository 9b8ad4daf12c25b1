"""From `block:///dev/..?role=..` to a store: reads the header, becomes the owner where it should, else reads only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rewarm.errors import ConfigError, FormatError, PoolInUse, StorageError
from rewarm.store.devices.base import Device
from rewarm.store.devices.select import choose_for_file
from rewarm.store.layout import PAGE
from rewarm.store.pool import host_id
from rewarm.store.raw.header import HEADER_OFFSETS, Header, newest, other_version
from rewarm.store.raw.lease import NOBODY, Terms
from rewarm.store.raw.media import Media, node_of, resolve, tries_direct
from rewarm.store.raw.owner import Owner
from rewarm.store.raw.sharing import release, share
from rewarm.store.raw.store import RawStore
from rewarm.store.settings import Settings

ROLES = ("auto", "owner", "reader")
Role = Literal["auto", "owner", "reader"]
Wrap = Callable[[Device], Device]


def facts_of(path: str) -> Header:
    """The header of a raw pool. Raises `ConfigError`, `FormatError`, `StorageError`."""
    real, block = resolve(path)
    try:
        media = Media(real, writable=False, direct=tries_direct(real, block))
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
    wrap_reads: Wrap | None = None,
    wrap_writes: Wrap = lambda device: device,
) -> RawStore:
    """Open a raw pool. With `auto` the host that formatted it owns it, with `owner` this one, with `reader` none.

    Where somebody else owns it and lives, `auto` opens a reader, and `owner` raises `PoolInUse`.
    """
    header = facts_of(path)
    real, block = resolve(path)
    choice = choose_for_file(real, direct=tries_direct(real, block), prefer=settings.device)
    name = host or host_id()
    owner: Owner | None = None
    terms = Terms(node_of(real, name), settings.poll_s, settings.lease_s, settings.poll_s)
    if role == "owner" or (role == "auto" and name == header.home):
        try:
            owner = share(real, terms, direct=choice.direct)
        except OSError as error:
            if role == "owner":
                raise StorageError(f"{path} cannot be owned: {error.strerror or error}") from error
        if owner is None and role == "owner":
            raise PoolInUse(f"{path} is owned by {facts_of(path).node.split('/')[0] or 'somebody else'}, who lives")

    def own_again(found: Header) -> Owner | None:
        """Never from another host, dead or not: to find out takes its lease, and the log must be followed meanwhile."""
        free = found.owner == NOBODY or found.node == terms.node
        return share(real, terms, direct=choice.direct) if free else None

    try:
        media = Media(real, writable=False, direct=choice.direct)
        return RawStore(
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
