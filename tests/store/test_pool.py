"""The tree of a pool: its file, its modes whatever the umask, and names that are not of the format."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.as_nobody import as_user, public_directory

from rewarm.errors import ConfigError, FormatError, StorageError
from rewarm.store.contract import Outcome, resolve_namespace
from rewarm.store.layout import PAGE
from rewarm.store.opening import open_store, repair_pool_file
from rewarm.store.pool import (
    CAPACITY_BYTES_MIN,
    SEGMENT_BYTES_MIN,
    OtherFormat,
    Pool,
    decode_facts,
    host_id,
    read_facts,
    segment_bytes_for,
    sync_directory,
)
from rewarm.testing import make_keys, payload

CAPACITY = 8 << 20


def save_some(root: Path, tag: str = "", *, count: int = 3, size: int = 5000, **options: object) -> list[bytes]:
    """Save blocks in a handle of its own."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    keys = make_keys(count, tag)
    with open_store(f"file://{root}?{query}" if query else f"file://{root}") as store:
        assert store.save(keys, [payload(key, size) for key in keys]).wait(60) == [True] * count
    return keys


def expect_hits(root: Path, keys: list[bytes], size: int = 5000) -> None:
    with open_store(f"file://{root}") as store:
        buffers = [bytearray(size) for _ in keys]
        assert store.load(keys, buffers).wait(60) == [True] * len(keys)
        assert buffers == [payload(key, size) for key in keys]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def umask_of_all_bits() -> Iterator[None]:
    before = os.umask(0o777)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask_of_all_bits")
@pytest.mark.parametrize(("access", "directory", "file"), [("private", 0o700, 0o600), ("group", 0o2770, 0o660)])
def test_modes_are_those_of_the_pool_whatever_the_umask(tmp_path: Path, access: str, directory: int, file: int) -> None:
    tmp_path.chmod(0o700)
    keys = save_some(tmp_path, capacity=CAPACITY, access=access)
    made = list(tmp_path.rglob("*"))
    assert {path.suffix for path in made if path.is_file()} == {".json", ".log", ".seg"}
    for path in made:
        assert mode_of(path) == (directory if path.is_dir() else file), path
    expect_hits(tmp_path, keys)


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as folder:
        yield folder


def test_users_of_one_group_share_a_pool(public: Path) -> None:
    root = public / "pool"
    root.mkdir()
    os.chown(root, 0, 4711)
    root.chmod(0o2770)
    first = as_user(lambda: save_some(root, "first", capacity=CAPACITY, access="group"), 1001, 4711, umask=0o777)
    assert first == str(make_keys(3, "first"))
    assert as_user(lambda: expect_hits(root, make_keys(3, "first")), 1002, 4711) == "None"
    assert as_user(lambda: save_some(root, "second"), 1002, 4711, umask=0o777) == str(make_keys(3, "second"))
    assert as_user(lambda: expect_hits(root, [*make_keys(3, "first"), *make_keys(3, "second")]), 1001, 4711) == "None"

    def evict_all() -> tuple[bool, int]:
        with open_store(f"file://{root}") as store:
            return store.evict(0) > 0, store.stats().blocks

    assert as_user(evict_all, 1001, 4711) == "(True, 0)"
    assert "StorageError" in as_user(lambda: save_some(root), 1003, 4712)


def test_the_first_of_two_openers_wins(tmp_path: Path) -> None:
    start, found = threading.Barrier(4), []

    def open_at_once(capacity: int) -> None:
        start.wait()
        try:
            found.append(Pool.open(tmp_path, capacity=capacity, access=None).facts)
        except ConfigError as error:
            found.append(error)

    threads = [threading.Thread(target=open_at_once, args=(CAPACITY * (1 + i % 2),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    facts = read_facts(tmp_path)
    assert sorted(str(one) for one in found if one != facts) == sorted(
        str(one) for one in found if isinstance(one, ConfigError)
    )
    assert found.count(facts) == 2
    assert os.listdir(tmp_path) == ["pool.json"], "no temporary file is left"


def test_a_pool_file_that_cannot_be_written_whole_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:10]))
        with pytest.raises(StorageError, match="No space left"):
            open_store(f"file://{tmp_path}?capacity={CAPACITY}")
    assert os.listdir(tmp_path) == []


# The file.


def write_pool_file(root: Path, **changes: object) -> None:
    facts = {"format": 1, "pool_id": "ab" * 16, "capacity_bytes": CAPACITY, "segment_bytes": CAPACITY // 64}
    facts |= {"access": "private", "host": "x", **changes}
    (root / "pool.json").write_bytes(msgspec.json.encode({k: v for k, v in facts.items() if v is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": None},
        {"format": "1"},
        {"pool_id": "xy"},
        {"pool_id": 7},
        {"capacity_bytes": -1},
        {"capacity_bytes": 1 << 63, "segment_bytes": 256 << 20},
        {"capacity_bytes": 10**30, "segment_bytes": 256 << 20},
        {"capacity_bytes": CAPACITY + 64 * PAGE},
        {"segment_bytes": 0},
        {"segment_bytes": PAGE + 1},
        {"access": "everybody"},
    ],
)
def test_impossible_values_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    write_pool_file(tmp_path, **changes)
    with pytest.raises(FormatError, match=r"pool\.json is damaged"):
        open_store(f"file://{tmp_path}")


@pytest.mark.parametrize("format_number", [0, 2, 1 << 40])
def test_another_version_is_refused_and_left_alone(tmp_path: Path, format_number: int) -> None:
    write_pool_file(tmp_path, format=format_number, capacity_bytes="of another meaning")
    before = (tmp_path / "pool.json").read_bytes()
    with pytest.raises(OtherFormat, match=f"format {format_number}; this version reads format 1"):
        open_store(f"file://{tmp_path}?capacity={CAPACITY}")
    with pytest.raises(OtherFormat):
        repair_pool_file(str(tmp_path))
    assert (tmp_path / "pool.json").read_bytes() == before


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    write_pool_file(tmp_path, color="blue", nested={"a": [1, 2]})
    facts = read_facts(tmp_path)
    assert facts is not None
    assert facts.capacity_bytes == CAPACITY


@given(raw=st.binary(max_size=200))
def test_noise_is_a_clear_error(raw: bytes) -> None:
    with pytest.raises(FormatError, match=r"pool\.json"):
        decode_facts(raw, Path("/p/pool.json"))


@pytest.mark.parametrize("raw", [b'{"x":' + b"[" * 30_000, b"[" * 60_000, b"", b"{}" * 40_000, b"\xff\xfe"])
def test_hostile_files_are_a_clear_error(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "pool.json").write_bytes(raw)
    with pytest.raises(FormatError, match=r"pool\.json is damaged or no pool file"):
        open_store(f"file://{tmp_path}")


def test_a_lost_pool_file_is_rebuilt(tmp_path: Path) -> None:
    keys = save_some(tmp_path, capacity=CAPACITY, access="group")
    before = read_facts(tmp_path)
    (tmp_path / "pool.json").unlink()
    with pytest.raises(FormatError, match=r"writers/ but no pool\.json; `rewarm check --fix`"):
        open_store(f"file://{tmp_path}?capacity={CAPACITY}")
    assert repair_pool_file(str(tmp_path))
    assert not repair_pool_file(str(tmp_path)), "nothing left to repair"
    after = read_facts(tmp_path)
    assert before is not None
    assert after == msgspec.structs.replace(before, host=after.host if after else "")
    expect_hits(tmp_path, keys)


def test_logs_that_disagree_rebuild_nothing(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in ("one", "other")]
    for root in roots:
        root.mkdir()
        save_some(root, capacity=CAPACITY)
    (moved,) = (roots[1] / "writers").iterdir()
    moved.rename(roots[0] / "writers" / moved.name)
    (roots[0] / "pool.json").unlink()
    with pytest.raises(FormatError, match="cannot be rebuilt"):
        repair_pool_file(str(roots[0]))


# Names.


@given(capacity=st.integers(CAPACITY_BYTES_MIN, 1 << 62))
def test_segments_are_a_64th_in_whole_pages(capacity: int) -> None:
    size = segment_bytes_for(capacity)
    assert size % PAGE == 0
    assert SEGMENT_BYTES_MIN <= size <= 256 << 20
    assert size == 256 << 20 or capacity // 64 - PAGE < size <= capacity // 64


def test_strangers_in_the_tree_are_left_alone(tmp_path: Path) -> None:
    keys = save_some(tmp_path, capacity=CAPACITY)
    (writer,) = (tmp_path / "writers").iterdir()
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "00000001.log").write_bytes(b"x" * PAGE)
    (tmp_path / "writers" / ("cd" * 16)).symlink_to(outside)
    os.mkfifo(tmp_path / "writers" / ("ef" * 16))
    (tmp_path / "writers" / "README").write_text("not ours")
    (tmp_path / "writers" / ("AB" * 16)).mkdir()
    os.mkfifo(writer / "00000007.seg")
    os.mkfifo(writer / "00000002.log")
    (writer / "00000008.seg").symlink_to("/dev/zero")
    (writer / "000000009.seg").write_bytes(b"nine digits")
    pool = Pool.open(tmp_path, capacity=None, access=None)
    assert pool.writer_ids() == [writer.name]
    assert [file.name for file in pool.files(writer.name)] == ["00000001.log", "00000001.seg"]
    expect_hits(tmp_path, keys)
    with open_store(f"file://{tmp_path}") as store:
        assert store.evict(0) > 0
        assert store.erase() == 0
        report = store.check(fix=True)
    assert report.clean, report.findings
    assert (writer / "00000008.seg").is_symlink()
    assert (outside / "00000001.log").exists()
    assert (tmp_path / "writers" / "README").exists()


def link_instead_of(root: Path, name: str) -> Path:
    """A new pool in which a directory is a link; returns where it leads."""
    root.mkdir()
    outside = root.parent / "outside"
    outside.mkdir()
    open_store(f"file://{root}?capacity={CAPACITY}").close()
    (root / name).symlink_to(outside)
    return outside


def test_a_link_in_place_of_the_writers_is_never_followed(tmp_path: Path) -> None:
    outside = link_instead_of(tmp_path / "pool", "writers")
    with pytest.raises(StorageError, match="not a directory"):
        open_store(f"file://{tmp_path / 'pool'}")
    assert os.listdir(outside) == []


def test_a_link_in_place_of_the_namespaces_is_never_followed(tmp_path: Path) -> None:
    outside = link_instead_of(tmp_path / "pool", "namespaces")
    with open_store(f"file://{tmp_path / 'pool'}") as store:
        transfer = store.save(make_keys(1), [bytes(5000)])
        assert transfer.wait(60) == [False]
        assert transfer.outcomes == [Outcome.LOST_MEDIUM]
        assert store.evict(0) == 0, "no command hangs for want of a writer"
    assert os.listdir(outside) == []


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_a_pool_file_of_another_kind_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pool.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        write_pool_file(tmp_path)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to("elsewhere")
    else:
        path.mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*pool\.json"):
        open_store(f"file://{tmp_path}?capacity={CAPACITY}")


def test_the_readable_copy_of_a_namespace(tmp_path: Path) -> None:
    digest, description = resolve_namespace("my model")
    with open_store(f"file://{tmp_path}?capacity={CAPACITY}", namespace="my model") as store:
        store.save(make_keys(1), [bytes(100)]).wait(60)
    raw = (tmp_path / "namespaces" / f"{digest.hex()}.json").read_bytes()
    assert msgspec.json.decode(raw) == {"digest": digest.hex(), "describe": description}


def test_reading_leaves_nothing_behind(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}?capacity={CAPACITY}").close()
    with open_store(f"file://{tmp_path}") as store:
        store.lookup(make_keys(3))
        assert store.load(make_keys(1), [bytearray(10)]).wait(60) == [False]
        store.check()
        store.flush()
        assert store.evict(0) == 0
    assert os.listdir(tmp_path) == ["pool.json"]


@pytest.mark.parametrize(("error", "matters"), [("EINVAL", False), ("ENOTSUP", False), ("EIO", True)])
def test_a_directory_that_cannot_be_synced(
    tmp_path: Path, error: str, matters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have nothing to sync there, and refuse; an error of the medium is one."""

    def refused(descriptor: int) -> None:
        raise OSError(getattr(errno, error), error)

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match=error) if matters else contextlib.nullcontext():
        sync_directory(tmp_path)


def test_a_host_without_a_machine_id_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Path, *rest: object, **more: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(Path, "read_text", gone)
    assert host_id() == os.uname().nodename
