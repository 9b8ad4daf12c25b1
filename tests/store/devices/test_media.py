"""What a directory or a file may refuse while it is examined: an error that names it, or the slower way."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store.devices.test_ladder import refuse_flags

from rewarm.errors import StorageError
from rewarm.store.devices import kernel, medium, select
from rewarm.store.devices.base import READ, WRITE
from rewarm.store.devices.select import LADDER, choose_device


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A file on a file system with O_DIRECT."""
    path = tmp_path / "sample"
    path.write_bytes(os.urandom(20_000))
    if not choose_device(tmp_path, writable=False, sample=path).direct:
        pytest.skip("no O_DIRECT on the file system of the temporary directory")
    return path


@pytest.mark.parametrize("call", [WRITE, READ])
def test_a_medium_that_fails_is_an_error(tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = medium.run_now
    monkeypatch.setattr(medium, "run_now", lambda opcode, *rest: -errno.EIO if opcode == call else plain(opcode, *rest))
    with pytest.raises(StorageError, match="EIO"):
        choose_device(tmp_path)


def test_a_directory_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flags(monkeypatch, os.O_PATH | os.O_DIRECTORY, errno.EACCES)
    with pytest.raises(StorageError, match=r"EACCES"):
        choose_device(tmp_path)


def test_a_directory_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flags(monkeypatch, os.O_TMPFILE, errno.EIO)
    with pytest.raises(StorageError, match="EIO"):
        choose_device(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [None, b""])
def test_without_a_table_of_mounts_the_type_is_unknown(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    if content is not None:
        table.write_bytes(content)
    plain = open
    monkeypatch.setattr(
        medium,
        "open",
        lambda path, *mode: plain(table if path == "/proc/self/mountinfo" else path, *mode),
        raising=False,
    )
    assert medium.filesystem_type(str(tmp_path)) == "unknown"


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EINVAL])
def test_a_kernel_that_says_no_alignment_has_the_usual_one(
    sample: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, number = kernel.call, kernel.number_of("statx")
    monkeypatch.setattr(kernel, "call", lambda call, *rest: -error if call == number else plain(call, *rest))
    choice = choose_device(sample.parent, writable=False, sample=sample)
    assert choice.direct
    assert choice.alignment == medium.ALIGNMENT_DEFAULT


# A reader, which has a sample to try.


def test_a_sample_in_memory_is_read_through_the_page_cache() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or medium.filesystem_type(str(shared)) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    path = shared / f"rewarm-sample-{os.getpid()}"
    path.write_bytes(os.urandom(5000))
    try:
        choice = choose_device(shared, writable=False, sample=path)
    finally:
        path.unlink()
    assert (choice.name, choice.direct) == ("threads", False)


def test_a_sample_whose_file_system_has_no_o_direct(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium, "direct_alignment", lambda fd: 0)
    choice = choose_device(sample.parent, writable=False, sample=sample)
    assert (choice.name, choice.direct) == ("threads", False)
    assert "statx" in choice.refusals[0]
    refuse_flags(monkeypatch, os.O_DIRECT, errno.EINVAL)
    choice = choose_device(sample.parent, writable=False, sample=sample)
    assert (choice.name, choice.direct) == ("threads", False)
    assert "O_DIRECT: EINVAL" in choice.refusals[0]


def test_a_sample_that_reads_differently_each_time_is_refused(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, turn = medium.run_now, iter(range(1, 100))

    def lying(opcode: int, fd: int, offset: int, address: int, length: int) -> int:
        result = plain(opcode, fd, offset, address, length)
        np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * length).from_address(address))[7] ^= next(turn)
        return result

    monkeypatch.setattr(medium, "run_now", lying)
    with pytest.raises(StorageError, match="differ from those of a plain read"):
        choose_device(sample.parent, writable=False, sample=sample)


# Rungs.


def test_where_no_rung_works_each_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(depth: int) -> object:
        raise StorageError(f"no depth of {depth} today")

    for name in list(LADDER):
        monkeypatch.setitem(select.LADDER, name, refused)
    with pytest.raises(StorageError, match=r"no device works in .*threads: no depth of 16 today"):
        choose_device(tmp_path, depth=16)


@pytest.mark.parametrize(("error", "blamed"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EROFS, True)])
def test_a_disk_that_fills_meanwhile_is_no_fault_of_the_rung(
    tmp_path: Path, error: int, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = medium.nameless_file, []

    @contextlib.contextmanager
    def filling(directory: str, flags: int) -> Iterator[int]:
        calls.append(flags)
        if len(calls) == 2:  # the first is the medium's own, the second that of the best rung
            raise OSError(error, os.strerror(error))
        with plain(directory, flags) as fd:
            yield fd

    best = choose_device(tmp_path).name
    monkeypatch.setattr(medium, "nameless_file", filling)
    if blamed and best == "threads":  # nothing is below it
        with pytest.raises(StorageError, match="threads: probe: EROFS"):
            choose_device(tmp_path)
        return
    choice = choose_device(tmp_path)
    assert any("probe: EROFS" in line for line in choice.refusals) is blamed
    assert blamed or choice.name == best
