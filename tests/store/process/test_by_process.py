"""Loads by an I/O process: right bytes and verdicts, everything else by the thread, and said so. Its code runs in a
thread here; `test_real.py` has real ones."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import numpy as np
import pytest
from tests.store.process.helpers import (
    SIZE,
    WAIT_S,
    ChildThread,
    arena_of,
    check_rows,
    eventually,
    in_a_thread,
    open_with_process,
    process_of,
    ready,
    saved,
)
from tests.store.raw.devices import make_file, open_as

from rewarm.errors import ConfigError, MisuseError
from rewarm.store.contract import Outcome
from rewarm.store.opening import open_store
from rewarm.store.process import engine, wire
from rewarm.testing import make_keys
from rewarm.tiers.dram import Region


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch) -> list[ChildThread]:
    return in_a_thread(monkeypatch)


def by_thread(store: object) -> int:
    return store._restorer._by_thread  # type: ignore[attr-defined,no-any-return]


def test_blocks_come_through_it_in_any_order_and_alignment(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 600, 512)
        rows = arena.reshape(-1)[: 600 * 512].reshape(600, 512)
        transfer = store.load(keys[::-1], rows)
        assert all(transfer.wait(WAIT_S))
        assert transfer.wait_released(WAIT_S)
        assert transfer.first_verdict_at is not None
        check_rows(rows, keys[::-1])
        scattered = [arena[block].data[3 : 3 + 512] for block in range(50)]
        assert all(store.load(keys[:50], scattered).wait(WAIT_S)), "unaligned: by memory of its own"
        check_rows(np.array([np.frombuffer(view, np.uint8) for view in scattered]), keys[:50])
        stats = store.stats()
        assert (stats.hits, stats.unreleased_bytes, by_thread(store)) == (650, 0, 0)
        assert stats.bytes_read >= 650 * 512
        assert any("reads into" in note for note in stats.notes)


def test_what_is_not_there_or_does_not_fit_is_a_miss(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 3)
        buffers = [arena[0], arena[1][: SIZE // 2], arena[2], arena[3]]
        transfer = store.load([*keys, *make_keys(1, "absent")], buffers)
        assert transfer.wait(WAIT_S) == [True, False, True, False]
        assert transfer.outcomes == [Outcome.HIT, Outcome.WRONG_SIZE, Outcome.HIT, Outcome.MISSING]
        assert transfer.wait_released(WAIT_S)
        nothing = store.load(make_keys(2, "absent"), arena[:2])
        assert nothing.wait_released(WAIT_S)
        assert nothing.outcomes == [Outcome.MISSING] * 2
        assert store.load([], []).wait(WAIT_S) == []
        assert process_of(store).outstanding() == 0


def test_several_arenas_serve_one_load(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        other = arena_of(8)
        store.register(other)
        keys = saved(store, 4)
        assert all(store.load(keys, [arena[0], other[0], arena[1], other[1]]).wait(WAIT_S))
        check_rows(np.array([arena[0], other[0], arena[1], other[1]]), keys)
        assert by_thread(store) == 0
        for wrong in (other, arena[3:5]):
            with pytest.raises(MisuseError, match="registered already"):
                store.register(wrong)


def test_a_staging_region_can_be_shared(tmp_path: Path) -> None:
    with open_with_process(tmp_path) as store:
        region = Region(8 * SIZE, SIZE, shared=True)
        region.register(store)
        keys = saved(store, 8)
        assert all(store.load(keys, region.memory).wait(WAIT_S))
        check_rows(region.memory, keys)
        assert by_thread(store) == 0


def test_a_damaged_block_is_read_again_by_the_thread_and_named(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 8)
        store.flush()
        store.close()
    with ready(tmp_path) as (store, arena):
        (segment,) = tmp_path.glob("writers/*/*.seg")
        with open(segment, "r+b") as file:
            file.seek(4096 + 3 * SIZE + 100)
            file.write(b"damage")
        transfer = store.load(keys, arena[:8])
        assert transfer.wait(WAIT_S) == [True] * 3 + [False] + [True] * 4
        assert transfer.outcomes[3] is Outcome.CORRUPT
        assert transfer.wait_released(WAIT_S)
        assert keys[3] not in store, "forgotten, so that the next save repairs it"
        assert any("1 blocks were read by the thread" in note for note in store.stats().notes)
        assert store.stats().unreleased_bytes == 0


def test_a_file_that_is_gone_is_a_miss_by_the_thread(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 4)
        (segment,) = tmp_path.glob("writers/*/*.seg")
        segment.unlink()
        store._restorer.forget(segment)
        transfer = store.load(keys, arena[:4])
        assert not any(transfer.wait(WAIT_S)) or transfer.wait() == [True] * 4, "its descriptor may be open here"
        assert transfer.wait_released(WAIT_S)


def test_memory_outside_goes_through_the_thread_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rewarm.store")
    with open_with_process(tmp_path) as store:
        assert any("no shared arena is registered yet" in note for note in store.stats().notes)
        keys = saved(store, 2)
        private = np.frombuffer(mmap.mmap(-1, 4 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        store.register(private)
        assert len(caplog.records) == 1
        assert any("private memory" in note for note in store.stats().notes)
        store.register(arena_of(2))
        rows = private.reshape(4, SIZE)[:2]
        assert all(store.load(keys, rows).wait(WAIT_S))
        check_rows(rows, keys)
        assert any("1 loads went through the thread" in note for note in store.stats().notes)
        with pytest.raises(MisuseError, match="read-only"):
            store.load(keys, [b"x" * SIZE] * 2)


def test_throttled_reads_stay_with_the_thread(tmp_path: Path) -> None:
    with open_with_process(tmp_path, device_wrapper=lambda device: device) as store:
        store.register(arena_of(1))
        keys = saved(store, 1)
        assert all(store.load(keys, arena_of(1)).wait(WAIT_S))
        assert any("wrapper" in note for note in store.stats().notes)
        assert store._restorer._process is None


def test_without_room_for_a_table_the_thread_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 4)
        monkeypatch.setattr(process_of(store)._space, "_free", [])
        assert all(store.load(keys, arena[:4]).wait(WAIT_S))
        assert by_thread(store) == 1


def test_a_cancelled_load_gives_its_memory_back(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 64)
        for _ in range(20):
            transfer = store.load(keys, arena)
            transfer.cancel()
            assert transfer.done()
            assert transfer.wait_released(WAIT_S)
        assert store.stats().unreleased_bytes == 0
        assert all(store.load(keys, arena).wait(WAIT_S))


def test_a_channel_that_ends_leaves_everything_to_the_thread(
    tmp_path: Path, children: list[ChildThread], caplog: pytest.LogCaptureFixture
) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 4)
        assert all(store.load(keys, arena[:4]).wait(WAIT_S))
        children[0].kill()
        eventually(lambda: process_of(store).ended)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert all(store.load(keys, arena[4:8]).wait(WAIT_S))
        check_rows(arena[4:8], keys)
        assert any("has ended" in note for note in store.stats().notes)
        assert store.register(arena_of(1)) >= 0


def test_a_process_that_cannot_start_is_said_and_missed_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    with ready(tmp_path) as (store, arena):
        assert any("cannot be started" in note for note in store.stats().notes)
        keys = saved(store, 2)
        assert all(store.load(keys, arena[:2]).wait(WAIT_S))


def test_messages_that_find_no_room_are_sent_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 4)
        send, refused = wire.send_now, [3]

        def hesitant(descriptor: int, datagram: bytes) -> bool:
            refused[0] -= 1
            return refused[0] < 0 and send(descriptor, datagram)

        monkeypatch.setattr(wire, "send_now", hesitant)
        assert all(store.load(keys, arena[:4]).wait(WAIT_S))
        check_rows(arena[:4], keys)


def test_idle_files_are_closed(tmp_path: Path, children: list[ChildThread], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewarm.store.process.child.IDLE_S", 0.02)
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 4)
        assert all(store.load(keys, arena[:4]).wait(WAIT_S))
        eventually(lambda: not children[0].child._side.files._open)


def test_a_silent_process_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 2)
        monkeypatch.setattr(process_of(store)._watch, "overdue", lambda: True)
        assert any("does not answer" in note for note in store.stats().notes)
        assert all(store.load(keys, arena[:2]).wait(WAIT_S))
        assert by_thread(store) == 1


def test_the_option_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'process'"):
        open_store(f"file://{tmp_path}?capacity=64MiB&io=proces")
    assert engine.STEP_ROWS <= 500


def test_a_raw_pool_says_that_its_thread_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_as(make_file(tmp_path / "raw.pool", 64 << 20, "me"), "me", "&io=process") as store:
        assert any("a raw pool is read by the thread" in note for note in store.stats().notes)
        assert len(caplog.records) == 1
