"""Becoming the owner of a raw pool: a delta lease, because common targets offer no compare-and-write.

Whoever finds no living owner writes a nonce, waits two periods and reads again: the nonce that is still there has won,
provided that nobody has become owner meanwhile. Dead is what has not counted for its lease, by our own clock; on one
machine the owner's lock tells at once. No clocks of two hosts are compared.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from rewarm.store.layout import PAGE
from rewarm.store.raw.header import CLAIM_OFFSET, HEADER_OFFSETS, Header, decode_claim, encode_claim, encode_header
from rewarm.store.raw.media import Media
from rewarm.store.raw.reservations import Reservation
from rewarm.store.raw.slots import read_header

CLAIM_PERIODS = 2
NOBODY = bytes(16)
CLAIM_ATTEMPTS = 30
"""A claimant that is too slow for a period starts over: on a busy machine with short periods often."""

LOCK_ATTEMPTS = 50
LOCK_PAUSE_S = 0.02


class Terms(msgspec.Struct, frozen=True):
    """Who asks for which pool, and for how long: seconds.

    A period is longer than a claimant takes from its look to its claim.
    """

    pool_id: bytes
    node: str
    period_s: float
    lease_s: float
    poll_s: float


class Tenure(msgspec.Struct, frozen=True):
    """An ownership that begins: its header, when its writing began (monotonic: its lease counts from it), its fence."""

    header: Header
    since_s: float
    reservation: Reservation


def acquire(media: Media, terms: Terms, former: bytes = NOBODY) -> Tenure | None:
    """Become the owner; None where somebody else lives or was faster. Raises `OSError`.

    `former` is the nonce of an owner in this very process that writes no more: it need not be waited for.
    """
    locked = media.lock()
    observed = read_header(media)
    if observed is None or observed.pool_id != terms.pool_id:
        return None
    if observed.owner != former and not _is_free(media, observed, terms, locked=locked):
        return None
    nonce = secrets.token_bytes(16)
    reservation = Reservation(media, nonce)
    reservation.register()  # Where the former owner has a reservation, nobody else may write a claim.
    try:
        header, since_s = _claim(media, observed, nonce, terms, reservation) or (None, 0.0)
    except OSError:
        reservation.release()
        raise
    if header is None:
        reservation.release()
        return None
    return Tenure(header, since_s, reservation)


def _claim(
    media: Media, observed: Header, nonce: bytes, terms: Terms, reservation: Reservation
) -> tuple[Header, float] | None:
    """Claim, wait, and own if the claim still stands; the header, and when its writing began."""
    for _ in range(CLAIM_ATTEMPTS):
        looked_s = time.monotonic()
        if read_header(media) != observed:
            return None
        media.write(CLAIM_OFFSET, encode_claim(nonce))
        media.sync()
        if time.monotonic() - looked_s > terms.period_s:
            continue  # Too slow: somebody else may have decided between our look and our claim.
        time.sleep(CLAIM_PERIODS * terms.period_s)
        if decode_claim(media.read(CLAIM_OFFSET, PAGE).data) != nonce or read_header(media) != observed:
            return None
        reservation.take(observed.owner)
        return _own(media, observed, nonce, terms)
    return None


def _is_free(media: Media, observed: Header, terms: Terms, *, locked: bool) -> bool:
    """True when nobody owns the pool, or the owner is dead."""
    if observed.owner == NOBODY:
        return True
    if observed.node == terms.node:
        return locked or _lock_late(media)
    return is_silent(media, observed)


def _lock_late(media: Media) -> bool:
    """Ask again for the lock of this machine: what a killed process had in the kernel keeps it for a moment."""
    for _ in range(LOCK_ATTEMPTS):
        time.sleep(LOCK_PAUSE_S)
        if media.lock():
            return True
    return False


def is_silent(media: Media, observed: Header) -> bool:
    """True when the owner does not count for its whole lease; False as soon as it does. Raises `OSError`."""
    end_s = time.monotonic() + observed.lease_ms / 1000
    while True:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return read_header(media) == observed
        time.sleep(min(left_s, max(observed.lease_ms / 1000 / 12, 0.005)))
        if read_header(media) != observed:
            return False


def _own(media: Media, observed: Header, nonce: bytes, terms: Terms) -> tuple[Header, float]:
    """Write both copies: a late write of the former owner hits one of them at most."""
    since_s = time.monotonic()
    mine = msgspec.structs.replace(
        observed,
        owner=nonce,
        counter=observed.counter + 1,
        lease_ms=int(terms.lease_s * 1000),
        poll_ms=int(terms.poll_s * 1000),
        node=terms.node,
    )
    for at in HEADER_OFFSETS:
        media.write(at, encode_header(mine))
    media.sync()
    return mine, since_s
