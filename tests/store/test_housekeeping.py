"""`check` beside the blocks: names, modes, owners, versions, leavings; nothing that is not ours is touched."""

from __future__ import annotations

import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store.as_nobody import NOBODY
from tests.store.test_checking import PRIVATE, check_and_fix, kinds, note_kinds, the
from tests.store.test_tailing import Forger, load, open_pool, save

from rewarm.store import layout
from rewarm.store.contract import Outcome
from rewarm.store.housekeeping import remove_unknown
from rewarm.store.layout import PAGE, Kind
from rewarm.store.pool import Pool
from rewarm.testing import make_keys

DAYS_AGO_S = 3 * 86400.0


@pytest.fixture(autouse=True)
def _private_files() -> Iterator[None]:
    before = os.umask(PRIVATE)
    yield
    os.umask(before)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Four blocks of a writer that is gone."""
    with open_pool(tmp_path) as store:
        assert save(store, make_keys(4)) == [Outcome.STORED] * 4
    return tmp_path


def make_old(path: Path) -> None:
    then = time.time() - DAYS_AGO_S
    os.utime(path, (then, then))


def test_modes_that_are_not_the_pools_are_put_right(pool: Path) -> None:
    segment = the(pool, "*/*.seg")
    before = {path: stat.S_IMODE(path.stat().st_mode) for path in pool.rglob("*")}
    for path, mode in ((pool / "pool.json", 0o644), (pool / "writers", 0o755), (segment, 0o666)):
        path.chmod(mode)
    first, fixed, after = check_and_fix(pool)
    assert kinds(first) == kinds(fixed) == ["wrong_access"] * 3
    assert not first.clean
    assert fixed.clean
    assert kinds(after) == []
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in before} == before


def test_another_owner_is_put_right(pool: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    log = the(pool, "*/*.log")
    os.chown(log, NOBODY, -1)
    first, fixed, after = check_and_fix(pool)
    assert kinds(first) == ["wrong_access"]
    assert f"user {NOBODY}" in first.findings[0].what
    assert fixed.clean
    assert kinds(after) == []
    assert log.stat().st_uid == os.geteuid()


def test_only_what_was_asked_for_removes_what_is_not_understood(pool: Path) -> None:
    writer = the(pool, "*")
    elsewhere = pool.parent / "precious"
    elsewhere.write_text("precious")
    strangers = [
        pool / "notes.txt",
        pool / "namespaces" / "README",
        pool / "writers" / "backup",
        writer / "00000001.bak",
        writer / "00000007.seg",
    ]
    for path in strangers[:-1]:
        path.write_text("mine")
    strangers[-1].symlink_to(elsewhere)
    os.mkfifo(writer / "00000002.log")
    (pool / "writers" / ("c" * 31)).mkdir()
    (pool / "writers" / ("c" * 31) / "deep").write_text("mine")
    strangers += [writer / "00000002.log", pool / "writers" / ("c" * 31)]
    _, fixed, _ = check_and_fix(pool)
    assert fixed.clean
    assert {note.where for note in fixed.notes} == {str(path.relative_to(pool)) for path in strangers}
    assert all(os.path.lexists(path) for path in strangers)
    removed = remove_unknown(Pool.open(pool, capacity=None, access=None))
    assert len(removed) == len(strangers)
    assert all(found.fixed for found in removed)
    assert not any(os.path.lexists(path) for path in strangers)
    assert elsewhere.read_text() == "precious"
    with open_pool(pool) as store:
        assert load(store, make_keys(4)) == [Outcome.HIT] * 4
        assert store.check().notes == []


def test_files_left_on_their_way_are_removed_after_a_day(pool: Path) -> None:
    old, young = pool / ".tmp-old", pool / "namespaces" / ".tmp-young"
    for path in (old, young):
        path.write_text("half")
    make_old(old)
    first, fixed, after = check_and_fix(pool)
    assert note_kinds(first) == note_kinds(fixed) == ["stale_temporary"]
    assert note_kinds(after) == []
    assert (old.exists(), young.exists()) == (False, True)


def test_a_dead_writer_with_nothing_left_is_removed_when_nobody_can_need_its_log(pool: Path) -> None:
    spent, fresh, dropper, empty = (Forger(pool) for _ in range(4))
    dropper.refer(Kind.DROPPED, 1, PAGE, the(pool, "*/*.seg").parent.name)
    (empty.folder / "00000001.log").unlink()
    for forger in (spent, dropper):
        make_old(forger.folder / "00000001.log")
    first, fixed, after = check_and_fix(pool)
    assert note_kinds(first) == note_kinds(fixed) == ["spent_writer"] * 2
    assert note_kinds(after) == []
    left = [forger.folder.exists() for forger in (spent, fresh, dropper, empty)]
    assert left == [False, True, True, False]


def _as_version_2(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(struct.pack("<H", 2))


@pytest.mark.parametrize("how", ["magic", "version"])
def test_files_of_another_version_are_left_alone(pool: Path, how: str) -> None:
    stranger = Forger(pool)
    stranger.segment(1, b"who knows")
    log, segment = stranger.folder / "00000001.log", stranger.folder / "00000001.seg"
    make_old(segment)
    if how == "magic":
        log.write_bytes(b"RWFRAME2" + bytes(PAGE - 8))
        segment.write_bytes(b"RWSEGMT2" + bytes(2 * PAGE - 8))
    else:
        _as_version_2(log, 12)
    _, fixed, after = check_and_fix(pool)
    assert fixed.clean
    assert note_kinds(fixed) == note_kinds(after) == ["foreign_version"] * 2
    assert log.exists()
    assert segment.exists()


def test_a_segment_of_another_version_beside_a_log_of_ours_is_left_alone(pool: Path) -> None:
    stranger = Forger(pool)
    (stranger.folder / "00000001.seg").write_bytes(b"RWSEGMT2" + bytes(2 * PAGE - 8))
    (stranger.folder / "00000002.seg").write_bytes(b"something else altogether".ljust(2 * PAGE))
    _, fixed, _ = check_and_fix(pool)
    assert note_kinds(fixed) == ["damaged_header", "foreign_version"]
    assert len(list(stranger.folder.glob("*.seg"))) == 2, "what is not understood is not removed as an orphan"


def test_a_sealed_segment_that_has_become_short_is_named(pool: Path) -> None:
    segment = the(pool, "*/*.seg")
    os.truncate(segment, segment.stat().st_size - 2 * PAGE)
    first, fixed, _ = check_and_fix(pool)
    assert (kinds(first), note_kinds(first)) == (["damaged_block"], ["short_segment"])
    assert fixed.clean


def test_entries_that_overlap_are_named(pool: Path) -> None:
    forger = Forger(pool)
    forger.segment(1, b"a" * 3 * PAGE)
    for key, offset, length in ((b"key 0001", PAGE, 2 * PAGE), (b"key 0002", 2 * PAGE, PAGE), (b"key 0003", PAGE, 9)):
        forger.entry(key, 1, offset, length, b"a" * length)
    first, fixed, after = check_and_fix(pool)
    assert kinds(first) == ["overlapping_entry"] * 2
    assert fixed.clean
    assert kinds(after) == []


@pytest.mark.parametrize(
    ("places", "bad"),
    [
        ([], []),
        ([(1, 1)], []),
        ([(1, 4096), (2, 1), (3, 1)], []),
        ([(1, 4096), (1, 4096)], []),
        ([(1, 4097), (2, 1)], [2]),
        ([(1, 1), (1, 2 * 4096)], [1]),
        ([(9, 1), (1, 20 * 4096), (5, 1), (30, 1)], [5, 9]),
    ],
)
def test_which_payloads_overlap(places: list[tuple[int, int]], bad: list[int]) -> None:
    offsets = np.array([page * PAGE for page, _ in places], np.uint64)
    lengths = np.array([length for _, length in places], np.uint32)
    assert (layout.overlaps(offsets, lengths) // PAGE).tolist() == bad


def test_what_a_late_writer_appended_after_its_adoption_is_not_checked(pool: Path) -> None:
    """Nobody takes it, so it is no damage: a stopped process that wakes up, whose segment was evicted meanwhile."""
    forger = Forger(pool)
    forger.segment(1, b"a" * PAGE)
    forger.entry(b"key 0001", 1, PAGE, PAGE, b"a" * PAGE)
    end = (forger.folder / "00000001.log").stat().st_size
    forger.entry(b"key 0002", 1, PAGE, PAGE, b"something else")
    with open_pool(pool) as store:
        assert not store.check().clean
    (forger.folder / "adopted").write_text(f'{{"log":1,"end":{end}}}')
    with open_pool(pool) as store:
        report = store.check()
    assert (report.clean, report.blocks, note_kinds(report)) == (True, 5, ["damaged_header"])
