"""Opening: what is wrong is said with what to write instead, before anything is made, and nothing is left open."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.store.as_nobody import as_user, public_directory

import rewarm
from rewarm.errors import ConfigError, FormatError, MisuseError, StorageError
from rewarm.store.devices.base import Device
from rewarm.store.file import FileStore
from rewarm.store.opening import open_store, parse_url
from rewarm.testing import FaultyDevice, make_keys

CAPACITY = 8 << 20


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "is empty; for example file:///"),
        ("fil:///tmp", "unknown scheme 'fil' .* did you mean 'file'"),
        ("s3://bucket", "unknown scheme 's3' .* one of memory, file"),
        ("kv", "unknown scheme ''"),
        ("file:kv", "three slashes"),
        ("file://host/kv", "three slashes"),
        ("file://[kv", "as a URL"),
        ("file:///kv#1", "'#' in a path as %23"),
        ("file:///a%00b", "zero byte"),
        ("/a\0b", "zero byte"),
        ("~nobody-has-this-name/kv", "path '~nobody-has-this-name/kv'"),
        ("file:///kv?capcity=1GiB", "unknown option 'capcity' .* did you mean 'capacity'"),
        ("file:///kv?colour=blue", "unknown option 'colour' .* one of capacity, access"),
        ("file:///kv?poll=1s&poll=2s", "option 'poll' stands twice"),
        ("file:///kv?capacity", "cannot read the options"),
        ("file:///kv?capacity=1GiB&&poll=1s", "cannot read the options"),
        ("/kv?capcity=1GiB", "did you mean 'capacity'"),
        ("memory:?poll=1s", "unknown option 'poll'"),
    ],
)
def test_urls_that_cannot_be_read(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "path", "options"),
    [
        ("file:///mnt/kv?capacity=2TiB", "/mnt/kv", {"capacity": "2TiB"}),
        ("file:///a%20b%3Fc", "/a b?c", {}),
        ("/mnt/kv?poll=1s&bounce=always", "/mnt/kv", {"poll": "1s", "bounce": "always"}),
        ("/mnt//kv/", "/mnt/kv", {}),
    ],
)
def test_urls_that_can(url: str, path: str, options: dict[str, str]) -> None:
    location = parse_url(url)
    assert (location.scheme, location.path, location.options) == ("file", path, options)


def test_paths_are_urls_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_url("./kv").path == parse_url(tmp_path / "kv").path == str(tmp_path / "kv")
    assert parse_url(".").path == str(tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("capacity=", "cannot read ''"),
        ("capacity=lots", "as a size"),
        ("capacity=1TB/s", "is a rate"),
        ("capacity=-1GiB", "cannot read"),
        ("capacity=1gib", "did you mean 'GiB'"),
        ("capacity=1e30TiB", "larger than any file"),
        ("capacity=0", "too small; at least 4.0 MiB"),
        ("capacity=4194303", "too small"),
        ("capacity=8MiB&poll=0", "poll=0 must lie above 0 and at most a day"),
        ("capacity=8MiB&poll=soon", "as a duration"),
        ("capacity=8MiB&io_deadline=2d", "io_deadline=2d must lie above 0"),
        ("capacity=8MiB&close_timeout=-1s", "as a duration"),
        ("capacity=8MiB&save_queue=1GB/s", "is a rate"),
        ("capacity=8MiB&access=all", "unknown access 'all'; one of private, group"),
        ("capacity=8MiB&access=grup", "did you mean 'group'"),
        ("capacity=8MiB&bounce=never", "unknown bounce 'never'"),
        ("capacity=8MiB&device=urin", "unknown device 'urin'; did you mean 'uring'"),
    ],
)
def test_options_that_make_no_sense_make_no_pool(tmp_path: Path, options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(f"file://{tmp_path}?{options}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("namespace", [b"", "", 7, object()])
def test_a_bad_namespace_makes_no_pool(tmp_path: Path, namespace: object) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        open_store(f"file://{tmp_path}?capacity={CAPACITY}", namespace=namespace)
    assert os.listdir(tmp_path) == []


def test_capacity_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no pool yet; .* add \?capacity="):
        open_store(tmp_path)
    with pytest.raises(ConfigError, match="capacity stands both"):
        open_store(f"file://{tmp_path}?capacity=8MiB", capacity="8MiB")
    open_store(tmp_path, capacity="8MiB").close()
    open_store(f"file://{tmp_path}?capacity=8MiB").close()
    with open_store(tmp_path) as store:
        assert store.stats().capacity_bytes == 8 << 20
    with pytest.raises(ConfigError, match=r"capacity=8388608 \(8.0 MiB\), not 16777216 \(16.0 MiB\); leave"):
        open_store(tmp_path, capacity=16 << 20)


def test_access_is_that_of_the_pool(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}?capacity=8MiB&access=group").close()
    with pytest.raises(ConfigError, match="made with access=group, not private; leave access out"):
        open_store(f"file://{tmp_path}?access=private")
    open_store(tmp_path).close()


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, says in (
        ("gone", "does not exist; create it"),
        ("file", "is not a directory"),
        ("file/kv", "does not exist: a part of it is no directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_store(f"file://{tmp_path / path}?capacity={CAPACITY}")


@pytest.fixture
def public() -> Iterator[Path]:
    with public_directory() as folder:
        yield folder


def test_no_permission(public: Path) -> None:
    locked, fixed, filled = public / "locked", public / "fixed", public / "filled"
    for folder, mode in ((locked, 0o700), (fixed, 0o755), (filled, 0o755)):
        folder.mkdir()
        folder.chmod(mode)
    open_store(f"file://{filled}?capacity={CAPACITY}").close()
    assert "StorageError: cannot read" in as_user(lambda: open_store(f"file://{locked}?capacity={CAPACITY}"))
    assert "StorageError: cannot read" in as_user(lambda: open_store(f"file://{locked / 'deeper'}?capacity={CAPACITY}"))
    answer = as_user(lambda: open_store(f"file://{fixed}?capacity={CAPACITY}"))
    assert answer == f"StorageError: no permission to write in {fixed}; the first open makes the pool there"
    answer = as_user(lambda: open_store(f"file://{filled}"))
    assert answer == f"StorageError: cannot read {filled / 'pool.json'}: Permission denied"


def test_who_may_only_read_reads(public: Path) -> None:
    root = public / "pool"
    root.mkdir()
    keys = make_keys(2)
    with open_store(f"file://{root}?capacity={CAPACITY}&access=group") as store:
        assert store.save(keys, [b"a" * 5000, b"b" * 5000]).wait(60) == [True, True]
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    def use() -> object:
        with open_store(root) as store:
            buffers = [bytearray(5000), bytearray(5000)]
            loaded = store.load(keys, buffers).wait(60)
            refused = store.save(make_keys(1, "new"), [bytes(10)])
            refused.wait(60)
            return (
                loaded,
                bytes(buffers[1][:2]),
                [str(one) for one in refused.outcomes],
                store.evict(0),
                keys[0] in store,
            )

    assert as_user(use) == "([True, True], b'bb', ['lost_medium'], 0, True)"


# What is left behind by a failure.


def resources() -> tuple[int, int]:
    for thread in threading.enumerate():
        if thread.name.startswith(("rewarm-io-", "rewarm-mount")):
            thread.join(60)  # workers of a device end by themselves, soon after it is closed
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_failed_open_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(f"file://{tmp_path}?capacity={CAPACITY}").close()
    before = resources()
    (tmp_path / "writers").write_text("not a directory")
    for _ in range(3):
        with pytest.raises(StorageError, match="not a directory"):
            open_store(tmp_path)
    (tmp_path / "writers").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", _refuse)
        with pytest.raises(StorageError, match="cannot open"):
            open_store(tmp_path)
    made: list[Device] = []

    def one_device_only(device: Device) -> Device:
        made.append(device)
        raise StorageError("no more rings")

    with pytest.raises(StorageError, match="no more rings"):
        open_store(tmp_path, write_device_wrapper=one_device_only)
    made.pop().close()
    assert resources() == before


def _refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_the_public_name_opens() -> None:
    with rewarm.open("memory:") as store:
        assert store.lookup(make_keys(1)).leading == 0


def test_wrappers_go_around_the_devices(tmp_path: Path) -> None:
    seen: list[str] = []

    def wrap(name: str) -> object:
        return lambda device: seen.append(name) or FaultyDevice(device)

    with open_store(
        f"file://{tmp_path}?capacity={CAPACITY}",
        device_wrapper=wrap("reads"),  # type: ignore[arg-type]
        write_device_wrapper=wrap("writes"),  # type: ignore[arg-type]
    ) as store:
        assert isinstance(store, FileStore)
    assert seen == ["reads", "writes"]


@pytest.mark.parametrize("device", ["threads", "uring", "aio"])
def test_a_device_can_be_named(tmp_path: Path, device: str) -> None:
    try:
        store = open_store(f"file://{tmp_path}?capacity={CAPACITY}&device={device}")
    except StorageError as error:
        pytest.skip(f"this machine has no {device}: {error}")
    with store:
        assert store.stats().device == device
        assert store.save(make_keys(1), [bytes(5000)]).wait(60) == [True]


def test_many_openings_leave_nothing_behind(tmp_path: Path) -> None:
    keys = make_keys(2)
    url = f"file://{tmp_path}?capacity={CAPACITY}"
    with open_store(url) as store:
        store.save(keys, [bytes(5000)] * 2).wait(60)
    before = resources()
    for turn in range(60):
        with open_store(url) as store:
            assert store.load(keys, [bytearray(5000), bytearray(5000)]).wait(60) == [True, True]
            if turn % 20 == 0:
                assert store.save(make_keys(1, str(turn)), [bytes(10)]).wait(60) == [True]
    assert resources() == before


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}?capacity={CAPACITY}")
    store.close()
    with pytest.raises(MisuseError, match="closed"):
        store.refresh()


def test_format_errors_are_configuration_errors() -> None:
    assert issubclass(FormatError, ConfigError)
    assert issubclass(ConfigError, ValueError)
