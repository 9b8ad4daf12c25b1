"""Every verb from many threads on one small pool while its media fail, hang and lie: right bytes, verdicts, no leak."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
import traceback
from pathlib import Path

import pytest
from tests.lengths import repeated
from tests.store.faulty_store import FaultyStore, arena, checked

from rewarm.errors import StorageError
from rewarm.store.contract import Outcome, Transfer
from rewarm.store.devices.base import READ, SYNC, WRITE
from rewarm.store.file import FileStore
from rewarm.testing import make_keys, payload
from rewarm.testing.faulty import bit_flip, failure, late, short, stall, torn_write

pytestmark = pytest.mark.crash

SECONDS = float(repeated(6, 12))
HANDLES = 3
THREADS = 9
CAPACITY = 16 << 20
VERDICT_S = 20.0
KEYS = make_keys(400)
VERBS = {"save": 45, "load": 45, "evict": 2, "erase": 1, "refresh": 2, "pin": 2, "check": 1, "flush": 1}
"""How often each is used."""

FAULTS = [
    (failure(errno.EIO), READ),
    (failure(errno.ESTALE), READ),
    (bit_flip(), READ),
    (stall(), READ),
    (failure(errno.ENOSPC), WRITE),
    (failure(errno.EIO), WRITE),
    (torn_write(), WRITE),
    (stall(), WRITE),
    (failure(errno.EIO), SYNC),
    (short(), None),
    (late(0.03), None),
]


def size_of(key: bytes) -> int:
    """Bytes of the block under a key: any number, aligned or not."""
    return 512 * (1 + key[0] % 120) + key[1] % 3


def give_up_sometimes(transfer: Transfer, dice: random.Random) -> None:
    """End a transfer as callers do: patiently, impatiently, or by cancelling it."""
    if dice.random() < 0.1:
        transfer.cancel()
    elif dice.random() < 0.1:
        transfer.wait(dice.random() * 0.01)
    start = time.monotonic()
    transfer.wait(VERDICT_S)
    assert time.monotonic() - start < VERDICT_S, "no verdict"
    assert transfer.wait_released(VERDICT_S), "no release"


def one_turn(store: FileStore, dice: random.Random) -> None:
    """Do one thing."""
    some = [dice.choice(KEYS) for _ in range(dice.randrange(1, 20))]
    (verb,) = dice.choices(list(VERBS), list(VERBS.values()))
    if verb == "save":
        give_up_sometimes(store.save(some, [payload(key, size_of(key)) for key in some]), dice)
    elif verb == "load":
        buffers = [arena(1, size_of(key))[0] if dice.random() < 0.5 else bytearray(size_of(key)) for key in some]
        transfer = store.load(some, buffers)
        give_up_sometimes(transfer, dice)
        assert set(checked(transfer, some, buffers)) <= set(Outcome)
    elif verb == "pin":
        with store.pin(some):
            store.lookup(some)
    else:
        with contextlib.suppress(StorageError):
            {
                "evict": lambda: store.evict(dice.choice([0, CAPACITY // 2])),
                "erase": store.erase,
                "refresh": store.refresh,
                "check": lambda: store.check(fix=dice.random() < 0.5),
                "flush": store.flush,
            }[verb]()


@pytest.mark.parametrize("options", ["", "&bounce=always", "&device=threads"])
def test_everything_at_once(tmp_path: Path, options: str) -> None:
    wrong: list[str] = []
    end = time.monotonic() + SECONDS
    stores = [
        FaultyStore(tmp_path, f"&poll=20ms&io_deadline=3s&close_timeout=3s{options}", capacity=CAPACITY)
        for _ in range(HANDLES)
    ]
    for one in stores:
        one.hurry(0.3)

    def work(number: int) -> None:
        dice = random.Random(number)
        try:
            while time.monotonic() < end:
                one_turn(stores[number % HANDLES].store, dice)
        except BaseException:  # noqa: BLE001 told to the test
            wrong.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    dice, pause = random.Random(99), threading.Event()
    while any(worker.is_alive() for worker in workers):
        device = dice.choice([device for one in stores for device in (one.reads, one.writes)])
        if time.monotonic() < end:
            fault, opcode = dice.choice(FAULTS)
            device.next(fault, count=dice.randrange(1, 4), opcode=opcode)
        pause.wait(dice.random() * 0.03)
        if dice.random() < 0.3:
            device.release_stalled()
    for one in stores:
        one.heal()
        one.store.close()
    for stats in [one.store.stats() for one in stores]:
        assert (stats.unreleased_bytes, stats.queued_bytes) == (0, 0)
        assert not [note for note in stats.notes if note.startswith("rewarm-")], "a loop has ended"
        # Handles that look at the same moment may each open a segment in the last room that there is.
        assert stats.used_bytes <= CAPACITY + HANDLES * CAPACITY // 64
    assert wrong == []
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("rewarm-")]:
        thread.join(VERDICT_S)  # workers of a device end by themselves, soon after it is closed
        assert not thread.is_alive(), thread.name
    assert not [link for link in descriptors() if str(tmp_path) in link]


def descriptors() -> list[str]:
    """What every open descriptor points to."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found
