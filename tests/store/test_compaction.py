"""Compaction: the log of a long-lived writer stays bounded, and whoever tails it loses nothing and keeps nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.store.faulty_store import WAIT_S
from tests.store.test_tailing import load, open_pool

from rewarm.store.contract import Outcome
from rewarm.store.file import FileStore
from rewarm.store.index import Index
from rewarm.store.log import LogWriter
from rewarm.testing import make_keys, payload

HIT, STORED = Outcome.HIT, Outcome.STORED
SEGMENT = (16 << 20) // 64
TURNS = 110
"""Frames of a page each: more than a segment's length of log."""


def logs(root: Path) -> list[Path]:
    return sorted((root / "writers").glob("*/*.log"))


def fill(store: FileStore, tag: str, turns: int = TURNS) -> list[bytes]:
    """Save block by block, so that the log grows by a page with each."""
    keys = make_keys(turns, tag)
    for key in keys:
        transfer = store.save([key], [payload(key, 5000)])
        transfer.wait(WAIT_S)
        assert transfer.outcomes == [STORED]
    return keys


def test_a_log_is_rolled_and_everybody_follows(tmp_path: Path) -> None:
    with (
        open_pool(tmp_path, "&poll=1h&log_keep=1ms") as store,
        open_pool(tmp_path) as tailer,
        open_pool(tmp_path) as sleeper,
    ):
        keys = fill(store, "a", 20)
        sleeper.refresh()
        for turn in range(4):
            keys += fill(store, str(turn), 60)
            tailer.refresh()
            assert tailer.lookup(keys).leading == len(keys)
        assert logs(tmp_path)[-1].name > "00000001.log", "it was rolled"
        assert len(logs(tmp_path)) <= 2, "old logs do not stay for ever"
        assert sum(log.stat().st_size for log in logs(tmp_path)) < 4 * SEGMENT
        sleeper.refresh()
        with open_pool(tmp_path) as fresh:
            for one in (store, tailer, sleeper, fresh):
                assert load(one, keys) == [HIT] * len(keys)
                assert one.stats().blocks == len(keys)
        assert store.check().clean
        assert store.check().blocks == len(keys)
    assert len({log.parent for log in logs(tmp_path)}) == 1, "one writer all along"


def test_what_the_snapshot_does_not_name_is_forgotten(tmp_path: Path) -> None:
    with open_pool(tmp_path, "&poll=1h&log_keep=1h") as store, open_pool(tmp_path) as tailer:
        keys = fill(store, "a", 12)
        tailer.refresh()
        assert tailer.lookup(keys).leading == 12
        with store.lock:
            places = store.index.places(keys[:1])
            store.index.remove_copy(keys[0], int(places.segment[0]), int(places.offset[0]))
        keys += fill(store, "b")
        assert len(logs(tmp_path)) == 2, "the old one stays for those who have not read it"
        tailer.refresh()
        assert tailer.lookup(keys).mask.tolist() == [False] + [True] * (len(keys) - 1)
        with open_pool(tmp_path) as fresh:
            assert fresh.lookup(keys).mask.tolist() == [False] + [True] * (len(keys) - 1)


def test_damage_that_was_named_stays_named(tmp_path: Path) -> None:
    with open_pool(tmp_path, "&poll=1h&log_keep=1ms") as store:
        keys = fill(store, "a", 70)
        (segment, *_) = sorted((tmp_path / "writers").glob("*/*.seg"))
        with open(segment, "r+b") as file:
            file.seek(5000)
            file.write(b"damage")
        assert not store.check().clean
        assert store.check(fix=True).clean
        keys += fill(store, "b")
        fill(store, "c")
        assert not (segment.parent / "00000001.log").exists()
        with open_pool(tmp_path) as fresh:
            assert fresh.lookup(keys).mask.tolist() == [False] + [True] * (len(keys) - 1)
            assert fresh.check().clean


def test_a_roll_that_fails_goes_on_as_another_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = LogWriter.append

    def refuse(self: LogWriter, *args: object, **more: object) -> int:
        if self.epoch > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, *args, **more)  # type: ignore[arg-type]

    with open_pool(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(LogWriter, "append", refuse)
            keys = fill(store, "a")
        assert len({log.parent for log in logs(tmp_path)}) == 2
        assert {log.name for log in logs(tmp_path)} == {"00000001.log"}, "what was begun is removed"
        assert load(store, keys) == [HIT] * len(keys)
        with open_pool(tmp_path) as fresh:
            assert load(fresh, keys) == [HIT] * len(keys)


def test_a_new_log_without_the_end_of_the_old_is_not_followed(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        keys = fill(store, "a", 5)
    (log,) = logs(tmp_path)
    log.with_name("00000002.log").write_bytes(bytes(4096))
    with open_pool(tmp_path) as store:
        assert load(store, keys) == [HIT] * 5


def test_nothing_is_rolled_while_files_are_missing(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        keys = fill(store, "a", 66)
        store.refresh()
        segment = min((tmp_path / "writers").glob("*/*.seg"))
        elsewhere = tmp_path / "elsewhere"
        segment.rename(elsewhere)
        store.refresh()
        assert not store.lookup(keys).mask.all(), "one's own files are missed, too"
        more = fill(store, "b")
        elsewhere.rename(segment)
        store.refresh()
        assert store.lookup(keys + more).mask.all(), "and their blocks come back with them"
        assert load(store, keys) == [HIT] * len(keys)


def test_the_index_keeps_only_places_that_are_named() -> None:
    import numpy as np

    index, keys = Index(), make_keys(4)
    offsets = np.array([4096, 8192, 4096, 8192], np.uint64)
    index.add(keys, np.array([0, 0, 1, 1]), offsets, np.full(4, 10, np.uint32), np.zeros(4, "V16"))
    assert index.keep_places([0], np.array([0, 1]), np.array([4096, 8192], np.uint64)) == 1
    assert index.contains(keys).tolist() == [True, False, True, True]
    assert index.keep_places([0, 1], np.zeros(0, np.int64), np.zeros(0, np.uint64)) == 3
    assert len(index) == 0
