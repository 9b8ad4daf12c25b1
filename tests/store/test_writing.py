"""The save path on a medium that misbehaves: True means published, everything else is a counted refusal."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store.faulty_store import WAIT_S, FaultyStore, arena, load, save

from rewarm.errors import MisuseError, StorageError
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import SYNC, WRITE
from rewarm.store.layout import Kind, scan_frames
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload
from rewarm.testing.faulty import failure, late, short, stall, torn_write

SIZE = 16 << 10
STORED, ALREADY, FULL, LOST = Outcome.STORED, Outcome.ALREADY, Outcome.REFUSED_FULL, Outcome.LOST_MEDIUM
HIT, MISSING, TIMED_OUT = Outcome.HIT, Outcome.MISSING, Outcome.TIMED_OUT


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path, "&poll=1h") as one:
        yield one


def writers(root: Path) -> list[str]:
    return sorted(os.listdir(root / "writers"))


# Requests that fail.


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (failure(errno.ENOSPC), FULL),
        (failure(errno.EDQUOT), FULL),
        (short(), FULL),
        (failure(errno.EIO), LOST),
        (failure(errno.EROFS), LOST),
    ],
)
def test_a_failed_write_refuses_its_blocks_and_saves_go_on(
    faulty: FaultyStore, tmp_path: Path, fault: object, outcome: Outcome
) -> None:
    keys = make_keys(6)
    assert save(faulty.store, keys[:2], SIZE) == [STORED] * 2
    faulty.writes.next(fault, count=2, opcode=WRITE)  # type: ignore[arg-type]
    assert set(save(faulty.store, keys[2:4], SIZE)) == {outcome}
    assert not faulty.store.lookup(keys[2:4]).mask.any()
    assert faulty.store.stats().refused[outcome] == 2
    faulty.heal()
    assert save(faulty.store, keys, SIZE) == [ALREADY] * 2 + [STORED] * 4
    assert load(faulty.store, keys, SIZE) == [HIT] * 6
    faulty.store.close()
    with FaultyStore(tmp_path) as again:
        assert load(again.store, keys, SIZE) == [HIT] * 6
        assert again.store.check().clean


def test_what_was_written_beside_a_failed_write_is_served(faulty: FaultyStore) -> None:
    """Groups in flight in one segment: one fails, the others are stored, and not lost with it."""
    keys = make_keys(40)
    for number in range(3):
        faulty.writes.at(number, late(0.05))
    faulty.writes.at(3, failure(errno.EIO))
    transfers = [faulty.store.save([key], [payload(key, SIZE)]) for key in keys]
    outcomes = [transfer.wait(WAIT_S) and transfer.outcomes[0] for transfer in transfers]
    assert outcomes.count(LOST) == 1
    good = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is STORED]
    assert len(good) == 39
    assert load(faulty.store, good, SIZE) == [HIT] * 39


def test_a_torn_write_is_never_served(tmp_path: Path) -> None:
    keys = make_keys(8)
    with FaultyStore(tmp_path) as one:
        one.writes.next(torn_write(), opcode=WRITE)
        assert save(one.store, keys, SIZE) == [STORED] * 8, "the medium said that it was written"
        outcomes = load(one.store, keys, SIZE)
        assert set(outcomes) <= {HIT, Outcome.CORRUPT}
        assert Outcome.CORRUPT in outcomes
        lost = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not HIT]
        assert save(one.store, keys, SIZE).count(STORED) == len(lost)
    with FaultyStore(tmp_path) as one:
        assert load(one.store, keys, SIZE) == [HIT] * 8


def test_a_failed_sync_seals_nothing(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(300)
    faulty.store.sync_first = False
    faulty.writes.chance(failure(errno.EIO), 1.0, opcode=SYNC)
    assert set(save(faulty.store, keys, SIZE)) == {STORED}
    assert len(list((tmp_path / "writers").glob("*/*.seg"))) > 3
    (log,) = (tmp_path / "writers").glob("*/*.log")
    kinds = {frame.kind for _, frame in scan_frames(memoryview(log.read_bytes()))}
    assert kinds == {Kind.OPEN, Kind.COUNTER, Kind.ENTRIES}
    assert load(faulty.store, keys, SIZE) == [HIT] * 300


def test_where_writes_end_in_a_cache_the_payload_is_synced_first(tmp_path: Path, faulty: FaultyStore) -> None:
    faulty.store.sync_first = True
    keys = make_keys(2)
    faulty.writes.next(failure(errno.EIO), opcode=SYNC)
    assert save(faulty.store, keys[:1], SIZE) == [LOST], "what was not synced is not published"
    assert keys[0] not in faulty.store
    assert save(faulty.store, keys, SIZE) == [STORED] * 2


def test_a_log_that_cannot_be_written_refuses(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(4)
    assert save(faulty.store, keys[:1], SIZE) == [STORED]
    for error, outcome in ((errno.ENOSPC, FULL), (errno.EIO, LOST)):

        def refuse(*_: object, error: int = error) -> int:
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            assert save(faulty.store, keys[1:], SIZE) == [outcome] * 3
        assert not faulty.store.lookup(keys[1:]).mask.any()
    assert save(faulty.store, keys[1:], SIZE) == [STORED] * 3
    faulty.store.close()
    with open_store(faulty.store.pool.root, namespace="faulty") as again:
        assert again.lookup(keys).leading == 4, "the log goes on behind what failed"


# Requests that hang.


def test_a_write_that_hangs_times_out_with_those_who_wait_for_it(tmp_path: Path) -> None:
    keys = make_keys(2)
    with FaultyStore(tmp_path, "&poll=1h") as one:
        one.hurry(1.0)
        one.writes.next(stall(), opcode=WRITE)
        hung = one.store.save(keys[:1], [payload(keys[0], SIZE)])
        follower = one.store.save(keys[:2], [payload(key, SIZE) for key in keys[:2]])
        others = 0
        while not (hung.done() and follower.done()) and others < 5000:
            assert save(one.store, make_keys(1, str(others)), SIZE) == [STORED], (
                "others go on, so the loop makes progress"
            )
            others += 1
        assert hung.outcomes == [TIMED_OUT]
        assert follower.outcomes == [TIMED_OUT, STORED]
        assert not hung.released()
        assert one.store.stats().unreleased_bytes == 3 * SIZE
        assert one.writes.release_stalled() == 1
        assert hung.wait_released(WAIT_S)
        assert follower.wait_released(WAIT_S)
        assert one.store.stats().unreleased_bytes == one.store.stats().queued_bytes == 0
        assert load(one.store, keys, SIZE) == [HIT] * 2, "what came late is published all the same"


def test_commands_do_not_wait_for_a_medium_that_hangs(tmp_path: Path) -> None:
    with FaultyStore(tmp_path, "&poll=1h") as one:
        one.hurry(0.2)
        one.writes.chance(stall(), 1.0, opcode=WRITE)
        transfer = one.store.save(make_keys(1), [bytes(SIZE)])
        # Whether the loop says so or who waits for it has waited long enough is a matter of moments.
        with pytest.raises(StorageError, match=r"does not answer|has not answered"):
            one.store.flush()
        with pytest.raises(StorageError, match=r"does not answer|has not answered"):
            one.store.erase()
        assert transfer.outcomes == [TIMED_OUT]


def test_cancelled_saves_keep_their_memory_while_the_kernel_reads_it(faulty: FaultyStore) -> None:
    keys = make_keys(1)
    faulty.writes.next(stall(), opcode=WRITE)
    block = arena(1, SIZE)
    block[0] = np.frombuffer(payload(keys[0], SIZE), np.uint8)
    transfer = faulty.store.save(keys, block)
    while not faulty.writes.stalled():
        transfer.wait_released(0.01)
    transfer.cancel()
    assert not transfer.wait_released(0.05)
    faulty.heal()
    assert transfer.wait_released(WAIT_S)
    block[:] = 0x5A
    assert transfer.outcomes == [Outcome.CANCELLED]
    assert load(faulty.store, keys, SIZE) in ([HIT], [MISSING])


def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    keys = make_keys(500)
    store = open_store(f"file://{tmp_path}?capacity=64MiB")
    transfers = [store.save([key], [payload(key, 3000)]) for key in keys]
    store.close()
    assert {outcome for transfer in transfers for outcome in transfer.outcomes} == {STORED}
    with open_store(tmp_path) as store:
        assert store.lookup(keys).leading == 500
        assert store.stats().notes == []


def test_close_gives_up_what_hangs_and_what_waits_behind_it(tmp_path: Path) -> None:
    keys = make_keys(400)
    with FaultyStore(tmp_path, "&close_timeout=100ms") as one:
        one.writes.chance(stall(), 1.0, opcode=WRITE)
        transfers = [one.store.save([key], [payload(key, SIZE)]) for key in keys]
        while not one.writes.stalled():
            transfers[0].wait_released(0.01)
        one.store.close()
        assert {transfer.wait(WAIT_S)[0] for transfer in transfers} == {False}
        assert sum(transfer.released() for transfer in transfers) >= 400 - one.writes.depth
        leaver = one.store._writes._thread
        assert leaver is not None
        one.heal()
        for transfer in transfers:
            assert transfer.wait_released(WAIT_S)
        leaver.join(WAIT_S)
        assert not leaver.is_alive()


# What the caller does meanwhile.


def test_lists_may_be_reused_at_once(faulty: FaultyStore) -> None:
    keys = make_keys(64)
    names, blocks = list(keys), [payload(key, SIZE) for key in keys]
    transfer = faulty.store.save(names, blocks)
    names[:] = [b"another key"] * 64
    blocks[:] = [bytes(SIZE)] * 64
    assert all(transfer.wait(WAIT_S))
    assert load(faulty.store, keys, SIZE) == [HIT] * 64


def test_a_refused_batch_breaks_nothing(faulty: FaultyStore) -> None:
    for bad in (
        [memoryview(bytearray(8192))[::2]],
        [object()],
        np.array([[None]]),
        np.zeros((1, 64), np.uint8)[:, ::2],
        [b""],
    ):
        with pytest.raises(MisuseError):
            faulty.store.save(make_keys(1), bad)  # type: ignore[arg-type]
    assert save(faulty.store, make_keys(1), SIZE) == [STORED]


def test_keys_of_several_lengths_in_one_batch(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = [key[: 8 + i % 25] for i, key in enumerate(make_keys(100))]
    assert set(save(faulty.store, keys, 100)) == {STORED}
    with open_store(tmp_path, namespace="faulty") as other:
        assert load(other, keys, 100) == [HIT] * 100  # type: ignore[arg-type]


def test_a_log_that_has_grown_is_rolled(faulty: FaultyStore, tmp_path: Path) -> None:
    keys = make_keys(1500)
    for start in range(0, 1500, 4):
        assert set(save(faulty.store, keys[start : start + 4], 30_000)) == {STORED}
    stats = faulty.store.stats()
    assert stats.used_bytes <= stats.capacity_bytes
    assert len(writers(tmp_path)) == 1
    assert max((tmp_path / "writers").glob("*/*.log")).name > "00000001.log", "logs end"
    assert faulty.store._writes.appender.writer is not None
    logs = sum(path.stat().st_size for path in (tmp_path / "writers").glob("*/*.log"))
    held = sum(path.stat().st_size for path in (tmp_path / "writers").glob("*/*.seg"))
    assert logs < held / 4
    assert load(faulty.store, keys[-100:], 30_000) == [HIT] * 100
    with open_store(tmp_path, namespace="faulty") as other:
        assert (other.lookup(keys).mask == faulty.store.lookup(keys).mask).all()
