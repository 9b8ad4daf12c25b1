"""`inspect`: counts what is there, reads no payload, leaves nothing behind and waits for nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.store.faulty_store import WAIT_S
from tests.store.test_tailing import Forger

from rewarm.errors import ConfigError, FormatError
from rewarm.store.contract import resolve_namespace
from rewarm.store.inspection import inspect_pool
from rewarm.store.layout import Kind
from rewarm.store.opening import open_store
from rewarm.testing import make_keys, payload

CAPACITY = 16 << 20
SIZE = 60_000


def save(root: Path, namespace: str, count: int, tag: str = "") -> None:
    keys = make_keys(count, tag)
    with open_store(f"file://{root}?capacity={CAPACITY}", namespace=namespace) as store:
        assert all(store.save(keys, [payload(key, SIZE) for key in keys]).wait(WAIT_S))


def used(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (root / "writers").rglob("*") if path.is_file())


def test_it_counts_what_is_there(tmp_path: Path) -> None:
    save(tmp_path, "one", 10)
    save(tmp_path, "one", 5, "more")
    save(tmp_path, "two", 3)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = inspect_pool(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (found.capacity_bytes, found.segment_bytes, found.access) == (CAPACITY, CAPACITY // 64, "private")
    assert found.blocks == 18
    assert found.used_bytes == used(tmp_path)
    described = {one.describe: (one.digest, one.writers, one.blocks) for one in found.namespaces}
    assert described == {
        "one": (resolve_namespace("one")[0].hex(), 2, 15),
        "two": (resolve_namespace("two")[0].hex(), 1, 3),
    }
    assert sorted(writer.blocks for writer in found.writers) == [3, 5, 10]
    assert not any(writer.alive for writer in found.writers)
    assert all(writer.segments == writer.sealed_segments for writer in found.writers), "closing seals"
    assert sum(writer.bytes_on_disk for writer in found.writers) == found.used_bytes


def test_the_living_are_told_from_the_dead(tmp_path: Path) -> None:
    save(tmp_path, "one", 4)
    with open_store(f"file://{tmp_path}", namespace="one") as store:
        assert store.save(make_keys(1, "x"), [bytes(SIZE)]).wait(WAIT_S) == [True]
        found = inspect_pool(tmp_path)
    assert sorted(writer.alive for writer in found.writers) == [False, True]
    alive = next(writer for writer in found.writers if writer.alive)
    assert (alive.segments, alive.sealed_segments, alive.blocks) == (1, 0, 1)


def test_evicted_blocks_are_not_counted(tmp_path: Path) -> None:
    with open_store(f"file://{tmp_path}?capacity={CAPACITY}") as store:
        keys = make_keys(40)
        store.save(keys, [payload(key, SIZE) for key in keys]).wait(WAIT_S)
        store.evict(CAPACITY // 16)
        left = int(store.lookup(keys).mask.sum())
        assert inspect_pool(tmp_path).blocks == left


def test_a_description_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    save(tmp_path, "one", 2)
    (copy,) = (tmp_path / "namespaces").iterdir()
    for make in (
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(b"\xff"),
    ):
        if copy.is_dir():
            copy.rmdir()
        else:
            copy.unlink()
        make(copy)
        (namespace,) = inspect_pool(tmp_path).namespaces
        assert (namespace.describe, namespace.blocks) == ("", 2)


def test_an_empty_pool(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}?capacity={CAPACITY}").close()
    found = inspect_pool(f"file://{tmp_path}")
    assert (found.blocks, found.used_bytes, found.writers, found.namespaces) == (0, 0, [], [])


def test_what_is_no_pool(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no pool"):
        inspect_pool(tmp_path)
    with pytest.raises(ConfigError, match="no pool on disk"):
        inspect_pool("memory:")
    with pytest.raises(ConfigError, match="does not exist"):
        inspect_pool(tmp_path / "gone")
    (tmp_path / "pool.json").write_text("{")
    with pytest.raises(FormatError, match="damaged"):
        inspect_pool(tmp_path)


def test_segments_are_listed_in_the_order_of_their_eviction(tmp_path: Path) -> None:
    save(tmp_path, "one", 10)
    for number, segment in enumerate(sorted((tmp_path / "writers").glob("*/*.seg"))):
        then = time.time() - 1000.0 + number // 2  # two of three at the same time
        os.utime(segment, (then, then))
    with open_store(f"file://{tmp_path}", namespace="one") as store:
        assert store.save(make_keys(1, "x"), [bytes(SIZE)]).wait(WAIT_S) == [True]
        assert inspect_pool(tmp_path).segments == []
        found = inspect_pool(tmp_path, segments=True)
    assert [one.state for one in found.segments] == ["sealed"] * (len(found.segments) - 1) + ["open"]
    assert sum(one.blocks for one in found.segments) == found.blocks == 11
    ages = [one.age_s for one in found.segments]
    assert ages == sorted(ages, reverse=True)


def test_a_writer_that_is_silent_and_one_that_was_adopted(tmp_path: Path) -> None:
    save(tmp_path, "one", 1)
    (log,) = (tmp_path / "writers").glob("*/*.log")
    then = time.time() - 1000.0
    os.utime(log, (then, then))
    forger = Forger(tmp_path)
    for _ in range(3):
        forger.frame(Kind.COUNTER, b"", 0)
    (forger.folder / "adopted").touch()
    assert not any(one.alive for one in inspect_pool(tmp_path).writers)
    writers = {one.writer: one for one in inspect_pool(tmp_path).writers}
    silent, adopted = writers[log.parent.name], writers[forger.id]
    assert (silent.adopted, silent.lease_s) == (False, 90.0)
    assert silent.counters >= 1
    assert silent.silent_s >= 999.0
    assert (adopted.adopted, adopted.counters) == (True, 3)
    assert adopted.silent_s < 900.0
