"""`inspect` of a raw pool: header and log, read only; whose it is and what is in it."""

from __future__ import annotations

import msgspec

from rewarm.errors import StorageError
from rewarm.store.layout import PAGE
from rewarm.store.raw.header import Header
from rewarm.store.raw.lease import NOBODY
from rewarm.store.raw.media import Media, resolve, tries_direct
from rewarm.store.raw.opening import facts_of
from rewarm.store.raw.slots import LogTail, SlotTable


class RawInspection(msgspec.Struct, frozen=True):
    """What `rewarm inspect block:..` shows. `owner` is a host, empty where nobody owns it; `blocks` counts copies, of
    all namespaces (32-byte digests in hex)."""

    path: str
    pool_id: str
    capacity_bytes: int
    slot_bytes: int
    used_bytes: int
    home: str
    owner: str
    lease_s: float
    log_epoch: int
    log_bytes: int
    blocks: int
    namespaces: dict[str, int]


def inspect_raw(path: str) -> RawInspection:
    """Inspect a raw pool. Raises `ConfigError` where there is none, `StorageError`."""
    header, table, log_bytes = _read(path)
    blocks: dict[str, int] = {}
    for slot in table.used.values():
        count = sum(len(entries) for _, entries in table.live(slot))
        blocks[slot.namespace.hex()] = blocks.get(slot.namespace.hex(), 0) + count
    return RawInspection(
        path=resolve(path)[0],
        pool_id=header.pool_id.hex(),
        capacity_bytes=header.capacity_bytes,
        slot_bytes=header.slot_bytes,
        used_bytes=len(table.used) * header.slot_bytes,
        home=header.home,
        owner="" if header.owner == NOBODY else header.node.split("/")[0],
        lease_s=header.lease_ms / 1000,
        log_epoch=header.epoch,
        log_bytes=log_bytes,
        blocks=sum(blocks.values()),
        namespaces=blocks,
    )


def places_of(path: str, namespace: bytes) -> list[range]:
    """Bytes of the device that hold blocks of a namespace, slot by slot, the oldest first. Raises as `inspect_raw`."""
    header, table, _ = _read(path)
    mine = sorted((slot for slot in table.used.values() if slot.namespace == namespace), key=lambda slot: slot.order)
    starts = [header.slot_offset(slot.number) for slot in mine]
    return [range(start + PAGE, start + slot.end) for start, slot in zip(starts, mine, strict=True)]


def _read(path: str) -> tuple[Header, SlotTable, int]:
    """Header, slots, and bytes of the log that counts."""
    header = facts_of(path)
    real, block = resolve(path)
    table = SlotTable(header)
    try:
        media = Media(real, writable=False, direct=tries_direct(real, block))
        try:
            tail = LogTail(media, header.pool_id, table.apply, lambda _: None)
            tail.refresh()
        finally:
            media.close()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return header, table, tail.at
