"""`check`: says what is wrong and nothing else, repairs what it says it repairs, removes nothing that may be good."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store.test_tailing import Forger, load, open_pool, save

from rewarm.store import layout
from rewarm.store.checking import check_pool
from rewarm.store.contract import CheckReport, Outcome
from rewarm.store.layout import PAGE, SEGMENT_GONE, Kind
from rewarm.store.pool import Pool
from rewarm.testing import make_keys, payload

SIZE = 5000
PRIVATE = 0o077
HIT, STORED = Outcome.HIT, Outcome.STORED


def kinds(report: CheckReport) -> list[str]:
    return sorted(finding.kind for finding in report.findings)


def note_kinds(report: CheckReport) -> list[str]:
    return sorted(note.kind for note in report.notes)


@pytest.fixture(autouse=True)
def _private_files() -> Iterator[None]:
    """What a test puts into a pool has the modes of the pool, unless it says otherwise."""
    before = os.umask(PRIVATE)
    yield
    os.umask(before)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Twelve blocks of a writer that is gone."""
    with open_pool(tmp_path) as store:
        assert save(store, make_keys(12)) == [STORED] * 12
    return tmp_path


def the(root: Path, pattern: str) -> Path:
    (path,) = (root / "writers").glob(pattern)
    return path


def damage(path: Path, at: int, content: bytes = b"damage") -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


def check_and_fix(root: Path) -> tuple[CheckReport, CheckReport, CheckReport]:
    """What a check, a repair and another check say."""
    with open_pool(root) as store:
        return store.check(), store.check(fix=True), store.check()


def test_a_good_pool_is_clean(pool: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in pool.rglob("*")}
    with open_pool(pool) as store:
        report = store.check()
    assert report.clean
    assert (report.findings, report.notes) == ([], [])
    assert (report.blocks, report.bytes_verified) == (12, 12 * SIZE)
    assert {path: path.stat().st_mtime_ns for path in pool.rglob("*")} == before, "it only reads"


def test_an_empty_pool_is_clean(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        assert store.check() == CheckReport(True, [], [], 0, 0)
        assert store.check(fix=True).clean
    assert os.listdir(tmp_path) == ["pool.json"]


def test_every_block_of_every_writer_and_namespace_is_verified(pool: Path) -> None:
    with open_pool(pool, namespace="another") as other, open_pool(pool) as store:
        save(other, make_keys(5))
        report = store.check()
    assert report.clean
    assert report.blocks == 17


def test_progress_is_told(pool: Path) -> None:
    told: list[int] = []
    report = check_pool(Pool.open(pool, capacity=None, access=None), direct=True, local=True, progress=told.append)
    assert sum(told) == report.bytes_verified


@pytest.mark.parametrize("what", ["bytes", "end"])
def test_a_damaged_block_is_named_once_and_repaired_by_a_save(pool: Path, what: str) -> None:
    segment = the(pool, "*/*.seg")
    if what == "bytes":
        damage(segment, PAGE + 2 * 2 * PAGE + 17)
        lost = 2
    else:
        os.truncate(segment, segment.stat().st_size - PAGE - 1)
        lost = 11
    first, fixed, after = check_and_fix(pool)
    assert kinds(first) == kinds(fixed) == ["damaged_block"]
    assert not first.clean
    assert first.findings[0].where.endswith(f"00000001.seg@{PAGE + lost * 2 * PAGE}")
    assert [finding.fixed for finding in fixed.findings] == [True]
    assert fixed.clean
    assert after.clean
    assert after.findings == []
    assert after.blocks == 11
    keys = make_keys(12)
    with open_pool(pool) as store:
        assert store.lookup(keys).mask.tolist() == [i != lost for i in range(12)]
        assert save(store, keys).count(STORED) == 1
        assert load(store, keys) == [HIT] * 12
        assert store.check().blocks == 12


def test_a_damaged_log_is_named_once(pool: Path) -> None:
    with open_pool(pool) as store:
        save(store, make_keys(3, "more"))
    logs = sorted((pool / "writers").glob("*/*.log"))
    damage(logs[0], 2 * PAGE + 200)
    first, fixed, after = check_and_fix(pool)
    assert kinds(first) == kinds(fixed) == ["damaged_log"]
    assert fixed.clean
    assert after.clean
    assert after.blocks in (3, 12)


def test_a_torn_last_frame_is_a_note(pool: Path) -> None:
    log = the(pool, "*/*.log")
    with open(log, "ab") as file:
        file.write(layout.FRAME_MAGIC + bytes(PAGE))
    first, fixed, _ = check_and_fix(pool)
    assert first.clean
    assert note_kinds(first) == ["torn_tail"]
    assert fixed.clean


def test_what_a_killed_writer_left_is_removed_by_fix_only(tmp_path: Path) -> None:
    keys = make_keys(3)
    with open_pool(tmp_path) as store:
        save(store, keys)
        forger = Forger(tmp_path)
        forger.segment(1, b"never published")
        first, fixed, after = check_and_fix(tmp_path)
        assert first.clean
        assert note_kinds(first) == note_kinds(fixed) == ["orphan_segment"]
        assert note_kinds(after) == []
        assert not (forger.folder / "00000001.seg").exists()
        assert load(store, keys) == [HIT] * 3, "the open segment of a living writer stays"


def test_what_was_announced_as_evicted_is_removed_by_fix(pool: Path) -> None:
    segment = the(pool, "*/*.seg")
    Forger(pool).refer(Kind.EVICTED, 1, SEGMENT_GONE, segment.parent.name)
    first, fixed, after = check_and_fix(pool)
    assert first.clean
    assert note_kinds(first) == note_kinds(fixed) == ["evicted_left"]
    assert note_kinds(after) == []
    assert not segment.exists()


def test_a_lost_segment_is_a_note(pool: Path) -> None:
    the(pool, "*/*.seg").unlink()
    first, fixed, _ = check_and_fix(pool)
    assert first.clean
    assert fixed.clean
    assert note_kinds(first) == ["missing_segment"]
    assert "12 blocks" in first.notes[0].what


def test_entries_that_cannot_be_are_named_once(tmp_path: Path) -> None:
    with open_pool(tmp_path) as store:
        save(store, make_keys(1))
    forger = Forger(tmp_path)
    forger.segment(1, b"x")
    for offset, length in ((3, 9), (PAGE, 0), ((1 << 64) - 1, 1), (PAGE, (1 << 32) - 1)):
        forger.entry(b"8 bytes.", 1, offset, length, b"x")
    first, fixed, after = check_and_fix(tmp_path)
    assert kinds(first) == ["impossible_entry"] * 4
    assert fixed.clean
    assert after.clean


def test_a_header_that_is_not_the_segments_is_a_note(pool: Path) -> None:
    damage(the(pool, "*/*.seg"), 0)
    with open_pool(pool) as store:
        report = store.check()
        assert load(store, make_keys(12)) == [HIT] * 12
    assert report.clean
    assert note_kinds(report) == ["damaged_header"]


def test_a_log_that_cannot_be_read_costs_no_segment(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = the(pool, "*/*.log")
    preadv = os.preadv

    def refuse(descriptor: int, *rest: object) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(log):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *rest)  # type: ignore[arg-type]

    with open_pool(pool) as store, monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        report = store.check(fix=True)
        assert kinds(report) == ["unreadable_log"]
        assert not report.clean
    with open_pool(pool) as store:
        assert load(store, make_keys(12)) == [HIT] * 12


def test_a_segment_that_cannot_be_read_is_a_finding(pool: Path) -> None:
    segment = the(pool, "*/*.seg")
    elsewhere = pool.parent / "elsewhere"
    segment.rename(elsewhere)
    segment.symlink_to(elsewhere)
    _, fixed, _ = check_and_fix(pool)
    assert note_kinds(fixed) == ["missing_segment", "unknown_name"], "a link is no segment"
    assert segment.is_symlink()


def test_unknown_names_are_notes_and_stay(pool: Path) -> None:
    (pool / "lost+found").mkdir()
    (pool / ".tmp-abc").write_text("on its way")
    _, fixed, _ = check_and_fix(pool)
    assert [(note.kind, note.where) for note in fixed.notes] == [("unknown_name", "lost+found")]
    assert (pool / "lost+found").exists()


def test_fix_beside_a_living_writer_and_its_saves(tmp_path: Path) -> None:
    with open_pool(tmp_path) as living, open_pool(tmp_path) as store:
        keys = make_keys(60)
        for start in range(0, 60, 20):
            transfer = living.save(keys[start : start + 20], [payload(key, SIZE) for key in keys[start : start + 20]])
            report = store.check(fix=True)
            assert report.clean
            assert report.findings == []
            transfer.wait(60)
        assert load(living, keys) == [HIT] * 60


@pytest.mark.parametrize("wreck", [lambda path: path.chmod(0), lambda path: shutil.rmtree(path)])
def test_a_pool_that_goes_meanwhile(pool: Path, wreck: Callable[[Path], None]) -> None:
    with open_pool(pool) as store:
        wreck(pool / "writers")
        report = store.check()
        assert report.blocks in (0, 12)


def test_repairing_many_blocks_takes_few_frames(tmp_path: Path) -> None:
    keys = make_keys(300)
    with open_pool(tmp_path) as store:
        save(store, keys)
    for segment in (tmp_path / "writers").glob("*/*.seg"):
        content = np.fromfile(segment, np.uint8)
        content[PAGE::PAGE] ^= 0xFF
        content.tofile(segment)
    with open_pool(tmp_path) as store:
        report = store.check(fix=True)
        assert kinds(report) == ["damaged_block"] * 300
        assert store.stats().bytes_log < 100 * PAGE
        assert not store.lookup(keys).mask.any()
    with open_pool(tmp_path) as store:
        assert not store.lookup(keys).mask.any()
        assert store.check().clean
