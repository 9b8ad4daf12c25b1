"""Two hosts on one raw pool: one owns and saves, the other reads; takeover, late owners, slots that are used again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.store.raw.devices import SHORT_WAITS, WAITS, make_file, open_as

import rewarm
from rewarm.errors import PoolInUse, StorageError
from rewarm.store.contract import Outcome
from rewarm.store.layout import PAGE
from rewarm.store.raw.header import CLAIM_OFFSET, encode_claim
from rewarm.store.raw.lease import Terms, acquire
from rewarm.store.raw.media import Media
from rewarm.store.raw.opening import facts_of
from rewarm.testing.kit.base import load, save
from rewarm.testing.payload import make_keys

BLOCK = 16 << 10
CAPACITY = 4 << 20


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return make_file(tmp_path / "device", CAPACITY, "a")


def test_another_host_reads_what_the_owner_saves(device: Path) -> None:
    keys = make_keys(20)
    with open_as(device, "a") as owner, open_as(device, "b") as reader:
        assert save(owner, keys, BLOCK) == [Outcome.STORED] * 20
        reader.refresh()
        assert reader.lookup(keys).leading == 20
        assert load(reader, keys, BLOCK) == [Outcome.HIT] * 20
        assert save(reader, make_keys(2, "no"), BLOCK) == [Outcome.REFUSED_ADMISSION] * 2
        assert reader.read_only
        assert not owner.read_only
        assert reader.evict(0) == 0
        with pytest.raises(StorageError, match="owned by another"):
            reader.erase()
        assert any("reads only" in note for note in reader.stats().notes)
    with open_as(device, "b") as late:
        assert load(late, keys, BLOCK) == [Outcome.HIT] * 20


def test_a_living_owner_keeps_others_out(device: Path) -> None:
    with open_as(device, "a"), pytest.raises(PoolInUse, match="owned by a"):
        open_as(device, "b", "&role=owner")


def test_a_used_slot_is_a_miss_for_who_has_not_polled(device: Path) -> None:
    keys = make_keys(400)
    with open_as(device, "a") as owner:
        save(owner, keys[:40], BLOCK)
        owner.flush()
        with open_as(device, "b") as reader:
            reader._stop.set()
            reader._poller.join()
            assert load(reader, keys[:40], BLOCK) == [Outcome.HIT] * 40
            for start in range(40, 400, 40):
                save(owner, keys[start : start + 40], BLOCK)
            assert not owner.lookup(keys[:20]).mask.any()
            assert reader.lookup(keys[:20]).mask.all(), "it has not polled"
            outcomes = load(reader, keys[:40], BLOCK)
            assert set(outcomes) <= {Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT}
            assert Outcome.HIT not in outcomes[:20]
            reader.refresh()
            assert load(reader, keys[-40:], BLOCK) == [Outcome.HIT] * 40


def test_a_slot_rests_for_its_grace_period_and_nobody_else_waits(device: Path) -> None:
    keys = make_keys(300)
    with open_as(device, "a", "&role=owner") as store:
        owner = store.owner
        assert owner is not None
        save(store, keys, BLOCK)
        owner.grace_s = 0.5
        with owner.lock:
            free = [n for n in range(owner.header.slots) if n not in owner.table.used]
            assert owner.evicted_slots, "something was evicted"
            now_s = time.monotonic()
            owner._freed_s = dict.fromkeys(free, now_s)
        late = store.save(make_keys(8, "late"), [bytes(BLOCK)] * 8)
        assert load(store, keys[-3:], BLOCK) == [Outcome.HIT] * 3
        queued = store.save(make_keys(1, "queued"), [bytes(BLOCK)])
        counter = owner.header.counter
        owner.count()
        assert owner.header.counter == counter + 1, "the owner goes on counting"
        assert not late.done()
        assert late.wait(30) == [True] * 8
        assert time.monotonic() - now_s >= owner.grace_s
        assert queued.wait(30) == [True]


def test_the_log_rolls_and_readers_follow(device: Path) -> None:
    keys = make_keys(80)
    with open_as(device, "a") as owner, open_as(device, "b") as reader:
        for key in keys:
            assert save(owner, [key], PAGE) == [Outcome.STORED]
        reader.refresh()
        assert facts_of(str(device)).epoch >= 2, "80 frames of a page do not fit into one half"
        assert load(reader, keys, PAGE) == [Outcome.HIT] * 80
    with open_as(device, "a") as again:
        assert load(again, keys, PAGE) == [Outcome.HIT] * 80


def test_readers_go_on_behind_a_frame_that_could_not_be_written(device: Path) -> None:
    keys = make_keys(3)
    with open_as(device, "a") as store, open_as(device, "b") as reader:
        assert save(store, keys[:1], BLOCK) == [Outcome.STORED]
        reader.refresh()
        owner = store.owner
        assert owner is not None
        write = owner.media.write

        def fail(offset: int, data: bytes) -> None:
            raise OSError("the medium")

        owner.media.write = fail  # type: ignore[method-assign]
        assert save(store, keys[1:2], BLOCK) == [Outcome.LOST_MEDIUM]
        owner.media.write = write  # type: ignore[method-assign]
        assert save(store, keys[2:], BLOCK) == [Outcome.STORED]
        reader.refresh()
        assert load(reader, keys, BLOCK) == [Outcome.HIT, Outcome.MISSING, Outcome.HIT]


def test_an_owner_that_gets_late_while_it_rolls_the_log_leaves_it(device: Path) -> None:
    keys = make_keys(20)
    with open_as(device, "a") as store, open_as(device, "b") as reader:
        save(store, keys, BLOCK)
        owner, before = store.owner, facts_of(str(device))
        assert owner is not None

        def sync_for_ever() -> None:
            owner._counted_s -= owner.header.lease_ms / 1000

        owner.media.sync = sync_for_ever  # type: ignore[method-assign]
        with owner.lock, pytest.raises(OSError, match="no longer owns"):
            owner._roll()
        after = facts_of(str(device))
        assert (after.epoch, after.writer) == (before.epoch, before.writer)
        reader.refresh()
        assert load(reader, keys, BLOCK) == [Outcome.HIT] * 20


def test_a_roll_that_fails_loses_nothing(device: Path) -> None:
    keys = make_keys(20)
    with open_as(device, "a") as store, open_as(device, "b") as reader:
        save(store, keys[:10], BLOCK)
        owner, before = store.owner, facts_of(str(device))
        assert owner is not None
        sync = owner.media.sync

        def fail() -> None:
            raise OSError("the medium")

        owner.media.sync = fail  # type: ignore[method-assign]
        with owner.lock, pytest.raises(OSError, match="the medium"):
            owner._roll()
        owner.media.sync = sync  # type: ignore[method-assign]
        owner.count()
        assert facts_of(str(device)).epoch == before.epoch, "half a snapshot does not count"
        assert save(store, keys[10:], BLOCK) == [Outcome.STORED] * 10
        reader.refresh()
        assert load(reader, keys, BLOCK) == [Outcome.HIT] * 20


@pytest.mark.crash
def test_a_dead_owner_is_replaced_and_its_late_frames_do_not_count(device: Path) -> None:
    keys = make_keys(30)
    with open_as(device, "a", waits=SHORT_WAITS) as late:
        assert save(late, keys[:10], BLOCK) == [Outcome.STORED] * 10
        owner = late.owner
        assert owner is not None
        owner._stop.set()  # As if the process were stopped: it counts no more.
        owner._thread.join()
        with open_as(device, "b", "&role=owner") as heir:
            assert load(heir, keys[:10], BLOCK) == [Outcome.HIT] * 10
            assert save(heir, keys[10:20], BLOCK) == [Outcome.STORED] * 10
            assert save(late, keys[20:], BLOCK) == [Outcome.LOST_MEDIUM] * 10, "its lease is over"
            owner.lost, owner._counted_s = False, time.monotonic()  # Stopped between the check and the write.
            save(late, keys[20:], BLOCK)
            with pytest.raises(OSError, match="no longer owns"):
                owner._write_header(owner.header)
            heir.refresh()
            assert not heir.lookup(keys[20:]).mask.any()
            with open_as(device, "c") as other:
                for store in (heir, other):  # A late payload may lie where the heir writes: a miss, never a hit.
                    outcomes = load(store, keys, BLOCK)
                    assert outcomes[:10] == [Outcome.HIT] * 10
                    assert set(outcomes[10:20]) <= {Outcome.HIT, Outcome.CORRUPT, Outcome.MISSING}
                    assert outcomes[20:] == [Outcome.MISSING] * 10
        assert late.read_only


def test_an_owner_that_was_late_becomes_owner_again(device: Path) -> None:
    keys = make_keys(10)
    with open_as(device, "a") as store:
        assert save(store, keys[:5], BLOCK) == [Outcome.STORED] * 5
        owner = store.owner
        assert owner is not None
        owner.lost = True
        end_s = time.monotonic() + 10
        while store.owner is owner and time.monotonic() < end_s:
            store.refresh()
        assert store.owner is not owner
        assert save(store, keys[5:], BLOCK) == [Outcome.STORED] * 5
        assert load(store, keys, BLOCK) == [Outcome.HIT] * 10


def test_of_two_claimants_the_last_nonce_wins(device: Path) -> None:
    terms = Terms(facts_of(str(device)).pool_id, "b/node", 0.05, 0.6, 0.05)
    media = Media(str(device), writable=True, direct=False)
    read, reads = media.read, []

    def overtaken(offset: int, count: int):  # type: ignore[no-untyped-def]
        if offset == CLAIM_OFFSET and not reads:
            reads.append(offset)
            media.write(CLAIM_OFFSET, encode_claim(bytes(range(16))))
        return read(offset, count)

    media.read = overtaken  # type: ignore[method-assign]
    assert acquire(media, terms) is None
    media.read = read  # type: ignore[method-assign]
    assert acquire(media, terms) is not None
    media.close()


def test_two_hosts_own_one_drive_each_and_read_both(tmp_path: Path) -> None:
    drives = {host: make_file(tmp_path / f"drive-{host}", CAPACITY, host) for host in "ab"}
    keys = {host: make_keys(40, host) for host in "ab"}

    def as_host(host: str) -> rewarm.Store:
        options = f"%3Fhost={host}%26" + WAITS.replace("&", "%26")
        return rewarm.open("pool:?" + "&".join(f"drive=block://{path}{options}" for path in drives.values()))

    with as_host("a") as a, as_host("b") as b:
        for host, store in (("a", a), ("b", b)):
            assert save(store, keys[host], BLOCK) == [Outcome.STORED] * 40
        for store in (a, b):
            store.refresh()
            for host in "ab":
                assert load(store, keys[host], BLOCK) == [Outcome.HIT] * 40
    for host in "ab":
        with open_as(drives[host], "c", namespace=None) as alone:
            assert alone.lookup(keys[host]).leading == 40, "each saved to its own drive"


def test_damage_is_a_miss_and_check_repairs(device: Path) -> None:
    keys = make_keys(8)
    with open_as(device, "a") as owner:
        save(owner, keys, BLOCK)
        owner.flush()
        places = owner.index.places(keys[:1])
        with device.open("r+b") as file:
            file.seek(int(places.offset[0]) + 5)
            file.write(b"damage")
        found = owner.check()
        assert not found.clean
        assert found.blocks == 7
        assert owner.check(fix=True).clean
        assert owner.check().clean
        assert load(owner, keys, BLOCK) == [Outcome.MISSING] + [Outcome.HIT] * 7
        assert save(owner, keys[:1], BLOCK) == [Outcome.STORED]
    with open_as(device, "b") as reader:
        assert load(reader, keys, BLOCK) == [Outcome.HIT] * 8
