"""A fence where the device offers one: the real refusal of one that does not, the order of requests to one that does.

A target that grants reservations is stood in for here; the real one is in the lab (`lab/nvmeof`, case `fence`).
"""

from __future__ import annotations

import fcntl
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.raw.devices import loop_over, make_file, open_as

from rewarm.store.contract import Outcome
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.media import Media
from rewarm.store.raw.reservations import CLEAR, CONFLICT, PREEMPT, REGISTER, RESERVE, Reservation
from rewarm.testing.kit.base import save
from rewarm.testing.payload import make_keys

OLD, NEW, OTHER = (bytes([number]) * 16 for number in (1, 2, 3))


class Target:
    """Write Exclusive, Registrants Only, as SPC and NVMe describe it, in the small: one device, several hosts."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.holder = ""

    def ask(self, host: str, request: int, content: bytes) -> int:
        """Answer one ioctl of a host."""
        if request == REGISTER:
            _, key, _, _ = struct.unpack("<QQII", content)
            self.keys[host] = key
            if not key:
                self._drop(host)
            return 0
        if host not in self.keys:
            return CONFLICT
        if request == RESERVE:
            if self.holder not in ("", host):
                return CONFLICT
            self.holder = host
        elif request == CLEAR:
            self.keys, self.holder = {}, ""
        elif request == PREEMPT:
            old = struct.unpack("<QQII", content)[0]
            losers = [name for name, key in self.keys.items() if key == old and name != host]
            if not losers:
                return CONFLICT
            for loser in losers:
                self._drop(loser)
            self.holder = host
        return 0

    def _drop(self, host: str) -> None:
        del self.keys[host]
        if self.holder == host:
            self.holder = ""


class Attached(Media):
    """A device of that target, seen by one host."""

    def __init__(self, target: Target, host: str) -> None:
        self.block = True
        self._ask: Callable[[int, bytes], int] = lambda request, content: target.ask(host, request, content)

    def control(self, request: int, content: bytes) -> int:
        return self._ask(request, content)


def reservation(target: Target, host: str, nonce: bytes) -> Reservation:
    made = Reservation(Attached(target, host), nonce)
    made.register()
    return made


def test_the_requests_are_those_of_the_kernel() -> None:
    assert [REGISTER, RESERVE, PREEMPT, CLEAR] == [0x401870C8, 0x401070C9, 0x401870CB, 0x401070CD]


def test_an_heir_takes_the_key_of_the_former_owner_away() -> None:
    target = Target()
    former = reservation(target, "a", OLD)
    former.take(bytes(16))
    assert former.held
    assert target.holder == "a"
    heir = reservation(target, "b", NEW)
    assert set(target.keys) == {"a", "b"}, "a claimant may write its claim"
    heir.take(OLD)
    assert heir.held
    assert target.holder == "b"
    assert set(target.keys) == {"b"}, "the former owner writes no more"
    heir.release()
    assert not target.holder
    assert not target.keys


def test_what_a_dead_claimant_left_is_cleared() -> None:
    target = Target()
    reservation(target, "c", OTHER).take(bytes(16))
    heir = reservation(target, "b", NEW)
    heir.take(OLD)
    assert heir.held
    assert set(target.keys) == {"b"}


def test_a_file_has_none_and_says_nothing(tmp_path: Path) -> None:
    device = make_file(tmp_path / "device", 4 << 20, "a")
    with open_as(device, "a") as store:
        assert store.owner is not None
        assert store.owner.reservation.why_not == "a file has none"
        assert not store.stats().notes


@pytest.mark.crash
def test_a_device_without_them_is_owned_without_a_fence(tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    with backing.open("wb") as file:
        file.truncate(8 << 20)
    with loop_over(backing) as device:
        with device.open("rb") as opened, pytest.raises(OSError, match=r"not supported|not permitted|Inappropriate"):
            fcntl.ioctl(opened, REGISTER, bytearray(24))
        format_device(str(device), host="a")
        with open_as(device, "a") as store:
            assert save(store, make_keys(3), 16 << 10) == [Outcome.STORED] * 3
            (note,) = store.stats().notes
            assert note.startswith("no fence against a late owner")
        format_device(str(device), host="a", force=True)
