"""Capacity and eviction: the oldest segments go, within the marks, whoever wrote them, and never more than needed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
from tests.store.faulty_store import WAIT_S

from rewarm.store.capacity import (
    FREE_FLOOR,
    HIGH_MARK,
    LOW_MARK,
    SPENT_LOG_S,
    Usage,
    could_fit,
    fits,
    is_pressed,
    target_bytes,
)
from rewarm.store.contract import Outcome, Store
from rewarm.store.opening import open_store
from rewarm.store.pool import FileFacts, Pool, PoolFacts
from rewarm.testing import make_keys, payload

CAPACITY = 16 << 20
SEGMENT = CAPACITY // 64
SIZE = 60_000
"""Four blocks fill a segment."""

LOOK_S = 0.002
"""Between two looks at what is used, so that who looks leaves the interpreter to who saves."""

HIT, MISSING, STORED, FULL = Outcome.HIT, Outcome.MISSING, Outcome.STORED, Outcome.REFUSED_FULL


def open_pool(root: Path, options: str = "", *, namespace: object = None) -> Store:
    """A lease of an hour: no writer says that it lives, which takes a page, between two looks at what is used."""
    return open_store(f"file://{root}?capacity={CAPACITY}&poll=1h&lease=1h{options}", namespace=namespace)


def save(store: Store, keys: list[bytes], *, batch: int = 16, size: int = SIZE) -> list[Outcome | None]:
    outcomes: list[Outcome | None] = []
    for start in range(0, len(keys), batch):
        some = keys[start : start + batch]
        transfer = store.save(some, [payload(key, size) for key in some])
        transfer.wait(WAIT_S)
        outcomes += transfer.outcomes
    return outcomes


def load(store: Store, keys: list[bytes]) -> list[Outcome | None]:
    buffers = [bytearray(SIZE) for _ in keys]
    transfer = store.load(keys, buffers)
    transfer.wait(WAIT_S)
    for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
        assert outcome is not HIT or buffer == payload(key, SIZE)
    return transfer.outcomes


def used(root: Path) -> int:
    """Bytes on disk, counted here."""
    return sum(path.stat().st_blocks * 512 for path in (root / "writers").rglob("*") if path.is_file())


# The arithmetic.


def usage(used_bytes: int, free_bytes: int = 1 << 40) -> Usage:
    return Usage(used_bytes, [], free_bytes, 1 << 40)


POOL = Pool(Path("/nowhere"), PoolFacts(1, "00" * 16, 1000 << 20, 1000 << 14))
MIB = 1 << 20


def test_eviction_begins_above_the_high_mark_and_ends_at_the_low_one() -> None:
    high, low = int(HIGH_MARK * 1000) * MIB, int(LOW_MARK * 1000) * MIB
    assert not is_pressed(POOL, usage(high - MIB), MIB)
    assert is_pressed(POOL, usage(high), MIB)
    assert target_bytes(POOL, usage(high), MIB, pressed=True) == low
    assert target_bytes(POOL, usage(low), MIB, pressed=True) == low
    assert target_bytes(POOL, usage(high - MIB), MIB, pressed=False) == high - MIB


def test_the_capacity_holds_whatever_the_marks_say() -> None:
    assert target_bytes(POOL, usage(900 * MIB), 200 * MIB, pressed=False) == 800 * MIB
    assert target_bytes(POOL, usage(900 * MIB), 2000 * MIB, pressed=False) == 0, "never more than there is"


def test_the_file_system_keeps_its_floor() -> None:
    total = 1 << 40
    floor = int(FREE_FLOOR * total)
    assert target_bytes(POOL, usage(500 * MIB, floor + MIB), MIB, pressed=False) == 500 * MIB
    assert 500 * MIB - target_bytes(POOL, usage(500 * MIB, floor), MIB, pressed=False) in (MIB, MIB + 1)
    assert target_bytes(POOL, usage(500 * MIB, 0), MIB, pressed=False) == 0, "never more than there is"


def test_what_fits() -> None:
    victims = [FileFacts("w", "1.seg", 1, True, 300 * MIB, 0, 0.0)]
    assert fits(POOL, usage(999 * MIB), MIB)
    assert not fits(POOL, usage(1000 * MIB), 1)
    assert could_fit(POOL, usage(1000 * MIB), 300 * MIB, victims)
    assert not could_fit(POOL, usage(1000 * MIB), 301 * MIB, victims)


# Real pools.


def test_a_pool_stays_within_its_capacity_at_every_moment(tmp_path: Path) -> None:
    keys = make_keys(600)
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(LOOK_S):
            try:
                peak = max(peak, used(tmp_path))
            except FileNotFoundError:
                continue

    with open_pool(tmp_path) as store:
        (tmp_path / "writers").mkdir()
        watcher = threading.Thread(target=watch)
        watcher.start()
        transfer = store.save(keys, [payload(key, SIZE) for key in keys])
        transfer.wait(WAIT_S)
        over.set()
        watcher.join()
        assert set(transfer.outcomes) == {STORED}, "older blocks make room for newer ones, even of one batch"
        assert 0.8 * CAPACITY < peak <= CAPACITY
        kept = store.lookup(keys).mask
        assert kept[-150:].all(), "the newest stay"
        assert not kept[:250].any(), "the oldest go"
        store.flush()
        assert store.stats().used_bytes == used(tmp_path)
        assert load(store, keys[-150:]) == [HIT] * 150


def test_capacity_holds_over_many_restarts(tmp_path: Path) -> None:
    for turn in range(6):
        keys = make_keys(100, str(turn))
        with open_pool(tmp_path) as store:
            assert save(store, keys) == [STORED] * 100
            assert used(tmp_path) <= CAPACITY
            assert load(store, keys) == [HIT] * 100
    assert used(tmp_path) > 0.75 * CAPACITY


def test_logs_of_the_evicted_go_when_everybody_has_read_them(tmp_path: Path) -> None:
    for turn in range(3):
        with open_pool(tmp_path) as store:
            save(store, make_keys(4, str(turn)))
            store.evict(0)
    assert len(os.listdir(tmp_path / "writers")) == 3, "what they say is evicted must be read first"
    long_ago = time.time() - 2 * SPENT_LOG_S
    for log in (tmp_path / "writers").glob("*/*.log"):
        os.utime(log, (long_ago, long_ago))
    with open_pool(tmp_path) as living, open_pool(tmp_path) as store:
        save(living, make_keys(1, "living"))
        (log,) = (tmp_path / "writers" / living._writes.appender.writer.id).glob("*.log")  # type: ignore[attr-defined]
        os.utime(log, (long_ago, long_ago))
        save(store, make_keys(8, "new"))
        assert store.evict(0) > 0
        assert len(os.listdir(tmp_path / "writers")) == 2, "those of the living stay"


def test_a_log_that_names_damage_stays(tmp_path: Path) -> None:
    keys = make_keys(2)
    with open_pool(tmp_path) as store:
        save(store, keys)
    (segment,) = (tmp_path / "writers").glob("*/*.seg")
    with open(segment, "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    with open_pool(tmp_path) as store:
        assert not store.check().clean
        assert store.check(fix=True).clean
    (dropper,) = {path.parent.name for path in (tmp_path / "writers").glob("*/*.log")} - {segment.parent.name}
    long_ago = time.time() - 2 * SPENT_LOG_S
    os.utime(tmp_path / "writers" / dropper / "00000001.log", (long_ago, long_ago))
    with open_pool(tmp_path) as store:
        save(store, make_keys(8, "new"), batch=1)
        with store.pin(keys):
            assert store.evict(0) > 0
        assert dropper in os.listdir(tmp_path / "writers")
        assert store.check().clean


@pytest.mark.crash
def test_writers_at_once_do_not_take_the_same_room(tmp_path: Path) -> None:
    peak = 0
    with contextlib.ExitStack() as closing:
        stores = [closing.enter_context(open_pool(tmp_path)) for _ in range(6)]
        workers = [
            threading.Thread(target=save, args=(store, make_keys(240, str(i))), kwargs={"batch": 8})
            for i, store in enumerate(stores)
        ]
        for worker in workers:
            worker.start()
        pause = threading.Event()
        while any(worker.is_alive() for worker in workers):
            pause.wait(LOOK_S)
            with contextlib.suppress(FileNotFoundError):
                peak = max(peak, used(tmp_path))
        assert sum(store.stats().stored for store in stores) > 6 * 200
    assert 0.8 * CAPACITY < peak <= CAPACITY + 2 * SEGMENT, "but for two who look at the same moment"


def test_open_segments_of_others_have_room_to_grow(tmp_path: Path) -> None:
    with contextlib.ExitStack() as closing:
        others = [closing.enter_context(open_pool(tmp_path)) for _ in range(8)]
        store = closing.enter_context(open_pool(tmp_path))
        for i, other in enumerate(others):
            assert save(other, make_keys(1, f"small {i}"), size=10) == [STORED]
        assert set(save(store, make_keys(400))) == {STORED}
        for i, other in enumerate(others):
            assert set(save(other, make_keys(3, f"more {i}"))) == {STORED}, "each fills the segment that it has open"
        assert used(tmp_path) <= CAPACITY


def test_pinned_segments_stay_and_a_pool_full_of_them_refuses(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        keys = make_keys(200)
        assert save(store, keys) == [STORED] * 200
        pins, outcome, turn = [store.pin(keys)], STORED, 0
        while outcome is STORED:
            more, turn = make_keys(1, f"more {turn}"), turn + 1
            (outcome,) = save(store, more)
            pins.append(store.pin(more))
            assert used(tmp_path) <= CAPACITY
        assert outcome is FULL
        store.evict(0)
        assert store.lookup(keys).leading == 200
        for pin in pins:
            pin.release()
        assert save(store, make_keys(60, "free again")) == [STORED] * 60
        assert not store.lookup(keys[:20]).mask.any()


def test_a_pin_taken_while_victims_are_chosen_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(tmp_path) as store:
        keys = make_keys(40)
        save(store, keys)
        pins = []
        access = os.access

        def pin_at_the_last_moment(path: str, mode: int) -> bool:
            pins.append(store.pin(keys))
            return access(path, mode)

        monkeypatch.setattr(os, "access", pin_at_the_last_moment)
        store.evict(0)
        assert pins
        assert load(store, keys) == [HIT] * 40


def test_nothing_goes_for_a_block_that_has_no_room_anyway(tmp_path: Path) -> None:
    keys = make_keys(100)
    with open_pool(tmp_path) as store:
        save(store, keys)
        transfer = store.save(make_keys(1, "huge"), [bytes(CAPACITY)])
        assert transfer.wait(WAIT_S) == [False]
        assert transfer.outcomes == [FULL]
        assert store.stats().evicted_segments == 0
        assert load(store, keys) == [HIT] * 100


def test_a_block_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        for turn in range(8):
            key = make_keys(1, f"large {turn}")
            assert save(store, key, size=9 * SEGMENT) == [STORED]
            assert used(tmp_path) <= CAPACITY


def test_segments_of_the_dead_go_with_a_restart(tmp_path: Path) -> None:
    old, new = make_keys(200, "old"), make_keys(200, "new")
    with open_pool(tmp_path) as store:
        save(store, old)
    with open_pool(tmp_path) as store:
        assert set(save(store, new)) == {STORED}
        assert store.lookup(new).mask.all()
        assert not store.lookup(old[:100]).mask.any(), "oldest first, whoever wrote it"
        assert used(tmp_path) <= CAPACITY


def test_sealed_segments_of_the_living_go_in_their_turn_and_open_ones_stay(tmp_path: Path) -> None:
    theirs, mine = make_keys(122, "theirs"), make_keys(200, "mine")
    with open_pool(tmp_path) as living, open_pool(tmp_path) as store:
        assert save(living, theirs) == [STORED] * 122
        store.refresh()
        assert save(store, mine) == [STORED] * 200
        living.refresh()
        kept = living.lookup(theirs).mask
        assert not kept[:40].any(), "the oldest go, whoever wrote them"
        assert kept[-2:].all(), "the segment that is being filled stays, however old"
        assert load(store, mine) == [HIT] * 200
        assert used(tmp_path) <= CAPACITY
        assert store.evict(0) > 0
        living.refresh()
        assert living.lookup(theirs).mask.sum() == 2
        assert load(living, theirs).count(HIT) == 2


def test_a_segment_whose_log_is_lost_can_go(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        save(store, make_keys(200))
    for log in (tmp_path / "writers").glob("*/*.log"):
        log.unlink()
    with open_pool(tmp_path) as store:
        new = make_keys(200, "new")
        assert set(save(store, new)) == {STORED}
        assert store.lookup(new).mask.all()
        assert used(tmp_path) <= CAPACITY


def test_evict_says_what_it_freed(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        save(store, make_keys(200))
        store.flush()  # A full segment is named as sealed once it is synced: a page of the log, after the verdicts.
        before = used(tmp_path)
        freed = store.evict(CAPACITY // 4)
        assert used(tmp_path) <= CAPACITY // 4
        assert before - used(tmp_path) <= freed <= before
        assert store.stats().evicted_bytes == freed
        assert store.evict(CAPACITY // 4) == 0


def test_files_that_cannot_be_removed_are_served_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(40)
    with open_pool(tmp_path) as store:
        save(store, keys)
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert store.evict(0) == 0
        assert load(store, keys) == [HIT] * 40


def test_an_announced_segment_is_forgotten_by_everybody(tmp_path: Path) -> None:
    keys = make_keys(200)
    with open_pool(tmp_path) as store, open_pool(tmp_path) as other:
        save(store, keys)
        other.refresh()
        assert load(other, keys) == [HIT] * 200
        store.evict(CAPACITY // 4)
        kept = store.lookup(keys).mask
        other.refresh()
        assert (other.lookup(keys).mask == kept).all()
        paths = {
            os.readlink(f"/proc/self/fd/{number}")
            for number in os.listdir("/proc/self/fd")
            if number.isdigit() and os.path.exists(f"/proc/self/fd/{number}")
        }
        assert not [path for path in paths if str(tmp_path) in path and path.endswith("(deleted)")], "files stay open"


def test_erase_takes_one_namespace_with_its_open_segments(tmp_path: Path) -> None:
    keys = make_keys(30)
    with (
        open_pool(tmp_path, namespace="a") as a,
        open_pool(tmp_path, namespace="a") as second,
        open_pool(tmp_path, namespace="b") as b,
    ):
        for store in (a, second, b):
            assert save(store, keys) == [STORED] * 30
        with a.pin(keys):
            assert a.erase() > 0
        assert not a.lookup(keys).mask.any()
        second.refresh()
        assert not second.lookup(keys).mask.any()
        assert load(b, keys) == [HIT] * 30
        assert save(second, keys) == [STORED] * 30, "who still lives goes on in new files"
        assert save(a, keys) == [STORED] * 30
    with open_pool(tmp_path, namespace="a") as a:
        assert load(a, keys) == [HIT] * 30


def test_erase_waits_for_saves_that_came_before(tmp_path: Path) -> None:
    keys = make_keys(200)
    with open_pool(tmp_path) as store:
        transfer = store.save(keys, [payload(key, 5000) for key in keys])
        store.erase()
        assert transfer.done()
        assert set(transfer.outcomes) == {STORED}
        assert not store.lookup(keys).mask.any()
        assert store.stats().blocks == 0


def test_a_log_does_not_grow_unseen_while_a_segment_is_filled(tmp_path: Path) -> None:
    """A block of ten bytes takes a page in its segment and a page in the log: room is looked for again in time."""
    with open_pool(tmp_path) as store:
        assert set(save(store, make_keys(40), batch=1, size=10)) == {STORED}
        segments = list((tmp_path / "writers").glob("*/*.seg"))
        assert len(segments) > 1
        assert sum(path.stat().st_size for path in segments) < SEGMENT
