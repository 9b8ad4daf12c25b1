"""The first pages of a raw pool: what it is, who owns it, and which log half counts. Pure functions over bytes.

Two copies of the header are written in turn, so that a torn write leaves the other; the higher (epoch, counter) counts.
A third page holds the claim of whoever wants to become the owner. See docs/reference/raw-1.md.
"""

from __future__ import annotations

import struct

import msgspec

from rewarm.errors import ConfigError
from rewarm.store.layout import PAGE, TRAILER_BYTES, digest
from rewarm.units import format_size

MAGIC = b"RWRAWPL1"
CLAIM_MAGIC = b"RWCLAIM1"
VERSION = 1
HEADER_OFFSETS = (0, PAGE)
CLAIM_OFFSET = 2 * PAGE
LOG_OFFSET = 1 << 20
"""What lies before it is reserved: headers, claim, and room for a later version."""

SLOT_BYTES_MAX = 256 << 20
SLOT_BYTES_MIN = 64 << 10
SLOTS_PER_POOL = 32
HALF_BYTES_MIN = 256 << 10
HALF_BYTES_MAX = 1 << 30
HALF_SHARE = 32
"""A log half takes this share of the device: entries of 4 KiB blocks with the longest keys take a fortieth."""

DEVICE_BYTES_MIN = 4 << 20
TEXT_BYTES = 128

_HEADER = struct.Struct(f"<8sI4x16sQQQQ16s16sQQII{TEXT_BYTES}s{TEXT_BYTES}s")
_CLAIM = struct.Struct("<8s16s")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a header page says. `owner` is 16 zero bytes when nobody owns it; `home` is the host that formatted it.

    `writer` is the id in the frames of the log half of `epoch`. `node` names the owner's host, boot and device file.
    """

    pool_id: bytes
    device_bytes: int
    half_bytes: int
    slot_bytes: int
    slots: int
    owner: bytes = bytes(16)
    writer: bytes = bytes(16)
    epoch: int = 0
    counter: int = 0
    lease_ms: int = 0
    poll_ms: int = 0
    home: str = ""
    node: str = ""

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def half_offset(self, epoch: int) -> int:
        """Where the log half of an epoch begins."""
        return LOG_OFFSET + epoch % 2 * self.half_bytes

    def slot_offset(self, slot: int) -> int:
        """Where a slot begins."""
        return LOG_OFFSET + 2 * self.half_bytes + slot * self.slot_bytes


def plan_header(device_bytes: int, pool_id: bytes, home: str, slot_bytes: int | None = None) -> Header:
    """The geometry of a new pool. Raises `ConfigError` where the device is too small."""
    if device_bytes < DEVICE_BYTES_MIN:
        raise ConfigError(
            f"{format_size(device_bytes)} are too few for a raw pool; at least {format_size(DEVICE_BYTES_MIN)}"
        )
    half = min(max(device_bytes // HALF_SHARE, HALF_BYTES_MIN), HALF_BYTES_MAX) // PAGE * PAGE
    room = device_bytes - LOG_OFFSET - 2 * half
    slot = slot_bytes or min(max(room // SLOTS_PER_POOL, SLOT_BYTES_MIN), SLOT_BYTES_MAX) // PAGE * PAGE
    if slot % PAGE or slot < SLOT_BYTES_MIN or room // slot < 4:
        raise ConfigError(
            f"slots of {slot} bytes do not fit: whole pages, at least {SLOT_BYTES_MIN}, four of them in {room}"
        )
    return Header(
        pool_id=pool_id,
        device_bytes=device_bytes,
        half_bytes=half,
        slot_bytes=slot,
        slots=room // slot,
        home=home,
    )


def encode_header(header: Header) -> bytes:
    """One header page."""
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        header.pool_id,
        header.device_bytes,
        header.half_bytes,
        header.slot_bytes,
        header.slots,
        header.owner,
        header.writer,
        header.epoch,
        header.counter,
        header.lease_ms,
        header.poll_ms,
        header.home.encode()[:TEXT_BYTES],
        header.node.encode()[:TEXT_BYTES],
    )
    return _page(head)


def decode_header(page: bytes | memoryview) -> Header | None:
    """A header page, or None for anything else: zeros, a torn write, another version."""
    page = bytes(page)
    if len(page) < PAGE or page[:8] != MAGIC or digest(page[: PAGE - TRAILER_BYTES]) != page[PAGE - TRAILER_BYTES :]:
        return None
    fields = _HEADER.unpack_from(page)
    _, version, pool_id, device, half, slot, slots, owner, writer, epoch, counter, lease, poll, home, node = fields
    sane = half and slot and slots and LOG_OFFSET + 2 * half + slots * slot <= device
    if version != VERSION or not sane or half % PAGE or slot % PAGE:
        return None
    return Header(
        pool_id=pool_id,
        device_bytes=device,
        half_bytes=half,
        slot_bytes=slot,
        slots=slots,
        owner=owner,
        writer=writer,
        epoch=epoch,
        counter=counter,
        lease_ms=lease,
        poll_ms=poll,
        home=home.rstrip(b"\0").decode(errors="replace"),
        node=node.rstrip(b"\0").decode(errors="replace"),
    )


def newest(pages: bytes | memoryview) -> Header | None:
    """The header that counts, out of the bytes from offset 0 on."""
    found = [header for at in HEADER_OFFSETS if (header := decode_header(pages[at : at + PAGE]))]
    return max(found, key=lambda header: (header.epoch, header.counter), default=None)


def other_version(pages: bytes | memoryview) -> bool:
    """True when a copy has the magic of a raw pool, and the version of another one."""
    return any(
        bytes(pages[at : at + 7]) == MAGIC[:7] and int.from_bytes(pages[at + 8 : at + 12], "little") != VERSION
        for at in HEADER_OFFSETS
    )


def encode_claim(nonce: bytes) -> bytes:
    """The claim page of one that wants to become the owner."""
    return _page(_CLAIM.pack(CLAIM_MAGIC, nonce))


def decode_claim(page: bytes | memoryview) -> bytes | None:
    """The nonce of a claim page, or None."""
    page = bytes(page)
    if len(page) < PAGE or digest(page[: PAGE - TRAILER_BYTES]) != page[PAGE - TRAILER_BYTES :]:
        return None
    magic, nonce = _CLAIM.unpack_from(page)
    return bytes(nonce) if magic == CLAIM_MAGIC else None


def _page(head: bytes) -> bytes:
    content = head + bytes(PAGE - TRAILER_BYTES - len(head))
    return content + digest(content)
