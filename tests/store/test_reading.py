"""The restore path on a medium that misbehaves: a miss costs its own block, memory given back stays as it is."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store.faulty_store import WAIT_S, FaultyStore, arena, checked, load, save

from rewarm.store.contract import Outcome
from rewarm.store.devices import medium
from rewarm.store.devices.base import READ
from rewarm.store.layout import PAGE
from rewarm.store.operations import OPERATION_BYTES
from rewarm.store.requests import Failure, failure_of
from rewarm.testing import make_keys
from rewarm.testing.faulty import bit_flip, failure, late, short

SIZE = 16 << 10
HIT, MISSING, CORRUPT, LOST = Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT, Outcome.LOST_MEDIUM


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    with FaultyStore(tmp_path, "&poll=1h") as one:
        yield one


# Requests that fail.


@pytest.mark.parametrize(
    ("result", "means"),
    [
        (0, Failure.SHORT),
        (4096, Failure.SHORT),
        (-errno.ENOENT, Failure.GONE),
        (-errno.ESTALE, Failure.GONE),
        (-errno.EIO, Failure.UNREADABLE),
        (-errno.EMFILE, Failure.MEDIUM),
        (-errno.ETIMEDOUT, Failure.MEDIUM),
    ],
)
def test_what_a_result_means(result: int, means: Failure) -> None:
    assert failure_of(result) is means


def test_one_bad_place_under_a_merged_read_costs_one_block(faulty: FaultyStore) -> None:
    keys = make_keys(32)
    save(faulty.store, keys, SIZE)
    faulty.places.bad = [range(PAGE + 5 * SIZE + 512, PAGE + 5 * SIZE + 1024)]
    before = faulty.reads.seen
    wanted = [LOST if i == 5 else HIT for i in range(32)]
    assert load(faulty.store, keys, SIZE) == wanted
    assert faulty.reads.seen - before <= 1 + 32 + 1, "read together, then each alone, then the bad one once more"
    assert faulty.store.lookup(keys).mask.tolist() == [i != 5 for i in range(32)], "it is not offered again"
    assert save(faulty.store, keys[5:6], SIZE) == [Outcome.STORED]
    assert load(faulty.store, keys, SIZE) == [HIT] * 32


@pytest.mark.parametrize("aligned", [True, False])
def test_a_failed_read_is_tried_once_more(faulty: FaultyStore, aligned: bool) -> None:
    keys = make_keys(1)
    save(faulty.store, keys, SIZE)
    faulty.reads.next(failure(errno.EIO), opcode=READ)
    assert load(faulty.store, keys, SIZE, aligned=aligned) == [HIT]
    faulty.reads.next(failure(errno.EIO), count=2, opcode=READ)
    assert load(faulty.store, keys, SIZE, aligned=aligned) == [LOST]
    assert keys[0] not in faulty.store


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT])
def test_a_medium_that_does_not_serve_now_keeps_its_blocks(faulty: FaultyStore, error: int) -> None:
    keys = make_keys(4)
    save(faulty.store, keys, SIZE)
    faulty.reads.chance(failure(error), 1.0, opcode=READ)
    assert load(faulty.store, keys, SIZE) == [LOST] * 4
    faulty.heal()
    assert load(faulty.store, keys, SIZE) == [HIT] * 4


@pytest.mark.parametrize("fault", [short(), bit_flip()])
@pytest.mark.parametrize("aligned", [True, False])
def test_wrong_or_missing_bytes_cost_the_block_and_are_repaired(tmp_path: Path, fault: object, aligned: bool) -> None:
    keys = make_keys(3)
    with FaultyStore(tmp_path) as one:
        save(one.store, keys, 5000)
    with FaultyStore(tmp_path) as one:
        one.reads.chance(fault, 1.0, opcode=READ)  # type: ignore[arg-type]
        assert load(one.store, keys[:1], 5000, aligned=aligned) == [CORRUPT]
        one.heal()
        assert load(one.store, keys, 5000, aligned=aligned) == [MISSING, HIT, HIT]
        assert save(one.store, keys, 5000) == [Outcome.STORED, Outcome.ALREADY, Outcome.ALREADY]
        assert load(one.store, keys, 5000, aligned=aligned) == [HIT] * 3


def test_only_wrong_bytes_are_named_in_the_log(tmp_path: Path) -> None:
    for fault, back in ((short(), True), (failure(errno.EIO), True), (bit_flip(), False)):
        root = tmp_path / str(fault.kind)
        root.mkdir()
        key, other = make_keys(2)
        with FaultyStore(root) as one:
            save(one.store, [key], SIZE)
        with FaultyStore(root) as one:
            save(one.store, [other], SIZE)
            one.reads.next(fault, count=2, opcode=READ)
            assert load(one.store, [key], SIZE) != [HIT]
        with FaultyStore(root) as one:
            assert (key in one.store) == back
            assert load(one.store, [key], SIZE) == ([HIT] if back else [MISSING])


def test_damage_seen_before_there_is_a_writer_is_named_by_the_first_save(tmp_path: Path) -> None:
    key, other = make_keys(2)
    with FaultyStore(tmp_path) as one:
        save(one.store, [key], SIZE)
    with FaultyStore(tmp_path) as one:
        one.reads.next(bit_flip(), opcode=READ)
        assert load(one.store, [key], SIZE) == [CORRUPT]
        assert len(list((tmp_path / "writers").iterdir())) == 1, "reading makes no writer"
        save(one.store, [other], SIZE)
    with FaultyStore(tmp_path) as one:
        assert key not in one.store
        assert other in one.store


def two_copies(root: Path, key: bytes) -> None:
    """Two writers that do not know of each other save the same key."""
    with FaultyStore(root, "&poll=1h") as one, FaultyStore(root, "&poll=1h") as other:
        assert save(one.store, [key], SIZE) == save(other.store, [key], SIZE) == [Outcome.STORED]


@pytest.mark.parametrize(
    "fault", [short(), bit_flip(), failure(errno.EIO), failure(errno.ENOENT), failure(errno.EMFILE)]
)
def test_the_second_copy_is_read_when_the_first_fails(tmp_path: Path, fault: object) -> None:
    key = make_keys(1)[0]
    two_copies(tmp_path, key)
    with FaultyStore(tmp_path, "&poll=1h") as one:
        one.reads.next(fault, count=1, opcode=READ)  # type: ignore[arg-type]
        assert load(one.store, [key], SIZE) == [HIT]
        assert one.reads.injected.total() == 1
        assert load(one.store, [key], SIZE) == [HIT]


def test_when_both_copies_are_damaged_it_is_a_miss_and_a_save_repairs_it_for_good(tmp_path: Path) -> None:
    key = make_keys(1)[0]
    two_copies(tmp_path, key)
    for segment in (tmp_path / "writers").glob("*/*.seg"):
        with open(segment, "r+b") as file:
            file.seek(PAGE + 100)
            file.write(b"damage")
    with FaultyStore(tmp_path, "&poll=1h") as one:
        assert load(one.store, [key], SIZE) == [CORRUPT]
        assert save(one.store, [key], SIZE) == [Outcome.STORED]
        assert load(one.store, [key], SIZE) == [HIT]
    with FaultyStore(tmp_path, "&poll=1h") as one:
        assert load(one.store, [key], SIZE) == [HIT], "a third copy would be hidden behind two that are known to be bad"


# Files that go.


def test_a_lost_segment_is_misses_until_it_comes_back(tmp_path: Path) -> None:
    keys = make_keys(5)
    with FaultyStore(tmp_path) as one:
        save(one.store, keys, SIZE)
    (segment,) = (tmp_path / "writers").glob("*/*.seg")
    with FaultyStore(tmp_path, "&poll=1h") as one:
        assert one.store.lookup(keys).leading == 5
        segment.rename(tmp_path / "elsewhere")
        assert load(one.store, keys, SIZE) == [MISSING] * 5
        assert not one.store.lookup(keys).mask.any()
        one.store.refresh()
        assert not one.store.lookup(keys).mask.any()
        (tmp_path / "elsewhere").rename(segment)
        one.store.refresh()
        assert load(one.store, keys, SIZE) == [HIT] * 5


def test_a_mount_that_goes_and_comes_back_brings_its_blocks_back(tmp_path: Path) -> None:
    keys = make_keys(5)
    with FaultyStore(tmp_path) as one:
        save(one.store, keys, SIZE)
    with FaultyStore(tmp_path, "&poll=1h") as one:
        (tmp_path / "writers").rename(tmp_path / "elsewhere")
        assert load(one.store, keys, SIZE) == [MISSING] * 5
        one.store.refresh()
        assert not one.store.lookup(keys).mask.any()
        (tmp_path / "elsewhere").rename(tmp_path / "writers")
        one.store.refresh()
        assert load(one.store, keys, SIZE) == [HIT] * 5


def test_a_directory_that_cannot_be_listed_does_not_end_the_reads(
    faulty: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(2)
    with FaultyStore(tmp_path, "&poll=1h") as other:
        save(other.store, keys, SIZE)
        faulty.store.refresh()

        def broken(path: object) -> object:
            raise OSError(errno.EIO, "the directory cannot be read")

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", broken)
            faulty.reads.next(bit_flip(), opcode=READ)
            assert load(faulty.store, keys[:1], SIZE)[0] in (HIT, CORRUPT)
        assert load(faulty.store, keys[1:], SIZE) == [HIT]
        assert faulty.store.stats().notes == []


# Shapes.


@pytest.mark.parametrize("size", [1, 511, 4096, OPERATION_BYTES, OPERATION_BYTES + 1, 5 * OPERATION_BYTES + 777])
def test_blocks_shorter_and_longer_than_a_request(faulty: FaultyStore, size: int) -> None:
    keys = make_keys(3)
    save(faulty.store, keys, size)
    assert load(faulty.store, keys, size, aligned=True) == [HIT] * 3
    assert load(faulty.store, keys[::-1], size, aligned=False) == [HIT] * 3


def test_a_late_read_of_a_part_decides_for_the_whole_block(faulty: FaultyStore) -> None:
    keys = make_keys(2)
    size = 3 * OPERATION_BYTES
    save(faulty.store, keys, size)
    faulty.reads.at(faulty.reads.seen + 1, late(0.05))
    assert load(faulty.store, keys, size) == [HIT] * 2
    faulty.reads.at(faulty.reads.seen + 2, bit_flip())
    assert load(faulty.store, keys, size) == [CORRUPT, HIT]


def test_bytes_are_counted_as_payload_and_padding(faulty: FaultyStore) -> None:
    keys = make_keys(10)
    save(faulty.store, keys, 5000)
    assert load(faulty.store, keys, 5000, aligned=False) == [HIT] * 10
    stats = faulty.store.stats()
    assert stats.bytes_read == 10 * 5000
    padded = 2 if faulty.store.alignment > 1 else 1  # on a medium without O_DIRECT a load reads no padding
    assert stats.bytes_padding == padded * 10 * (8192 - 5000), "of the save and of the load"
    assert stats.unreleased_bytes == stats.queued_bytes == 0


def test_loads_from_many_threads_while_reads_come_late(faulty: FaultyStore) -> None:
    keys = make_keys(40)
    save(faulty.store, keys, SIZE)
    faulty.reads.chance(late(0.002), 0.2, opcode=READ)
    faulty.reads.chance(failure(errno.EIO), 0.02, opcode=READ)
    wrong: list[BaseException] = []

    def work(seed: int) -> None:
        dice = np.random.default_rng(seed)
        try:
            for _ in range(15):
                some = [keys[i] for i in dice.integers(0, 40, 10)]
                buffers = list(arena(10, SIZE))
                transfer = faulty.store.load(some, buffers)
                if dice.random() < 0.3:
                    transfer.cancel()
                transfer.wait(WAIT_S)
                assert transfer.wait_released(WAIT_S)
                outcomes = checked(transfer, some, buffers)
                assert set(outcomes) <= {HIT, LOST, MISSING, Outcome.CANCELLED}
        except BaseException as error:  # noqa: BLE001 told to the test
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + WAIT_S
    for worker in workers:
        worker.join(max(deadline - time.monotonic(), 0))
        assert not worker.is_alive()
    assert wrong == []
    assert faulty.store.stats().unreleased_bytes == 0


@pytest.mark.parametrize("own", [True, False])
def test_what_a_network_mount_could_not_read_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """EIO from a server that is away says nothing of a block: it stayed missing, though the server was back."""
    monkeypatch.setattr(medium, "NETWORK_FILESYSTEMS", frozenset({medium.filesystem_type(str(tmp_path))}))
    keys = make_keys(3)
    with FaultyStore(tmp_path, "&poll=1h") as writer, FaultyStore(tmp_path, "&poll=1h") as other:
        assert save(writer.store, keys, SIZE) == [Outcome.STORED] * 3
        other.store.refresh()
        reader = writer if own else other
        reader.places.bad = [range(1 << 30)]
        assert load(reader.store, keys, SIZE) == [LOST] * 3
        assert not reader.store.lookup(keys).mask.any(), "so that a save would repair it"
        reader.places.bad = []
        reader.store.refresh()
        assert load(reader.store, keys, SIZE) == [HIT] * 3


@pytest.mark.parametrize("own", [True, False])
def test_what_a_local_medium_could_not_read_is_taken_again_later(tmp_path: Path, own: bool) -> None:
    """A device that was away comes back with its blocks; until then they are forgotten, so that a save repairs them."""
    keys = make_keys(3)
    with FaultyStore(tmp_path, "&poll=1h") as writer, FaultyStore(tmp_path, "&poll=1h") as other:
        assert save(writer.store, keys, SIZE) == [Outcome.STORED] * 3
        other.store.refresh()
        reader = writer if own else other
        reader.hurry(0.3)
        reader.places.bad = [range(1 << 30)]
        assert load(reader.store, keys, SIZE) == [LOST] * 3
        reader.store.refresh()
        assert not reader.store.lookup(keys).mask.any()
        reader.places.bad = []
        deadline_s = time.monotonic() + WAIT_S
        while not reader.store.lookup(keys).mask.all():
            assert time.monotonic() < deadline_s
            reader.store.refresh()
        assert load(reader.store, keys, SIZE) == [HIT] * 3
