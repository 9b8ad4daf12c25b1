"""The ladder, by really taking rungs away: a seccomp filter, limits, permissions, file systems that refuse."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rewarm.errors import ConfigError, StorageError
from rewarm.store.devices import kernel, medium, ring, select
from rewarm.store.devices.base import READ, WRITE
from rewarm.store.devices.select import LADDER, choose_device
from rewarm.store.devices.uring import UringDevice

REFUSE = """
import ctypes, errno, struct
def refuse(numbers):
    "A real seccomp filter for this process: these system calls fail with EPERM, as in a container."
    program = [(0x20, 0, 0, 0)]  # load the number
    for number in numbers:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM)]  # equal: return the error
    program.append((0x06, 0, 0, 0x7FFF0000))  # else allow
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *one) for one in program))
    header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP, a filter
"""

CHOOSE = """
import dataclasses, json, sys
from rewarm.errors import RewarmError
from rewarm.store.devices import kernel
from rewarm.store.devices.select import choose_device
def choose(**options):
    try:
        print(json.dumps(dataclasses.asdict(choose_device(sys.argv[1], **options))))
    except RewarmError as error:
        print(json.dumps({"error": type(error).__name__, "says": str(error)}))
"""


def in_process(directory: Path, body: str) -> list[dict[str, object]]:
    """Run `body` in a process of its own, which it may cripple; returns what each `choose()` there printed."""
    source = REFUSE + CHOOSE + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", source, str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A directory in which nothing may be left behind. Skips where the file system has no O_DIRECT at all."""
    directory = tmp_path / "pool"
    directory.mkdir()
    if not choose_device(directory).direct:
        pytest.skip("no O_DIRECT on the file system of the temporary directory: there is no ladder to climb")
    yield directory
    assert os.listdir(directory) == []


@pytest.fixture
def descriptors() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


# Rungs taken away.


def test_the_best_rung_is_chosen(empty: Path, descriptors: None) -> None:
    try:
        UringDevice().close()
    except StorageError as error:
        pytest.skip(f"this machine has no io_uring: {error}")
    choice = choose_device(empty, depth=32)
    assert (choice.name, choice.depth, choice.refusals) == ("uring", 32, [])
    assert choice.alignment >= 512
    device = choice.open()
    assert (device.name, device.depth) == ("uring", 32)
    device.close()


def test_without_io_uring_aio(empty: Path) -> None:
    (choice,) = in_process(empty, "refuse([kernel.number_of('io_uring_setup')]); choose()")
    assert choice["name"] == "aio"
    assert choice["direct"] is True
    assert choice["refusals"] == ["uring: io_uring_setup: EPERM (Operation not permitted)"]


@pytest.mark.parametrize(("call", "says"), [("io_setup", "io_setup"), ("io_submit", "probe")])
def test_without_io_uring_and_aio_threads(empty: Path, call: str, says: str) -> None:
    body = f"refuse([kernel.number_of('io_uring_setup'), kernel.number_of('{call}')]); choose()"
    (choice,) = in_process(empty, body)
    assert choice["name"] == "threads"
    assert choice["direct"] is True
    assert choice["refusals"] == [
        "uring: io_uring_setup: EPERM (Operation not permitted)",
        f"aio: {says}: EPERM (Operation not permitted)",
    ]


def test_an_enter_that_is_refused_later_is_found_by_the_probe(empty: Path) -> None:
    (choice,) = in_process(empty, "refuse([kernel.number_of('io_uring_enter')]); choose()")
    assert choice["name"] == "aio"
    assert choice["refusals"] == ["uring: io_uring_enter: EPERM (Operation not permitted)"]


def test_a_preferred_rung_that_is_refused_is_an_error(empty: Path) -> None:
    body = """
    refuse([kernel.number_of('io_uring_setup'), kernel.number_of('io_setup')])
    for name in ('uring', 'aio', 'threads'):
        choose(prefer=name)
    """
    uring, aio, threads = in_process(empty, body)
    assert uring["error"] == aio["error"] == "StorageError"
    assert "device=uring" in str(uring["says"])
    assert "io_uring_setup: EPERM" in str(uring["says"])
    assert "io_setup: EPERM" in str(aio["says"])
    assert (threads["name"], threads["direct"], threads["refusals"]) == ("threads", True, [])


def test_a_machine_of_another_kind_has_threads(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    choice = choose_device(empty)
    assert choice.name == "threads"
    assert all("riscv64" in line for line in choice.refusals)
    assert len(choice.refusals) == 2


def test_a_ring_of_weak_order_needs_deferred_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        UringDevice().close()
    except StorageError as error:
        pytest.skip(f"this machine has no io_uring: {error}")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    UringDevice().close()  # the numbers of these calls are the same everywhere
    monkeypatch.setattr(ring, "_SETUPS", (0,))
    with pytest.raises(StorageError, match="DEFER_TASKRUN"):
        UringDevice()


def test_a_file_size_limit_is_an_error_and_leaves_nothing(empty: Path) -> None:
    (refused,) = in_process(empty, "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); choose()")
    assert refused["error"] == "StorageError"
    assert "EFBIG" in str(refused["says"])


def test_no_descriptors_left(empty: Path) -> None:
    body = """
    import os, resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open('/', os.O_RDONLY))
    except OSError:
        pass
    choose()
    for spare in range(5):  # enough for the probe's file, then for a device beside it
        os.close(held.pop())
        choose()
    """
    found = in_process(empty, body)
    assert found[0]["error"] == "StorageError"
    assert "EMFILE" in str(found[0]["says"])
    assert found[-1]["name"] == "uring" or "io_uring_setup" in str(found[-1])


# The preferred rung.


@pytest.mark.parametrize("name", list(LADDER))
def test_a_preferred_rung(empty: Path, name: str, descriptors: None) -> None:
    try:
        choice = choose_device(empty, prefer=name)
    except StorageError as error:
        pytest.skip(str(error))
    assert choice.name == name
    assert choice.direct
    assert choice.refusals == []


def test_an_unknown_rung(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'urng'; one of auto, uring, aio, threads; .*'uring'"):
        choose_device(tmp_path, prefer="urng")


# Directories.


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        choose_device(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        choose_device(tmp_path / "file", writable=False)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    directory = tmp_path / "pool"
    directory.mkdir()
    directory.chmod(0o555)
    tmp_path.chmod(0o755)
    body = """
    import os
    if os.geteuid() == 0:
        os.chdir(sys.argv[1])  # the parents belong to root
        sys.argv[1] = '.'
        os.seteuid(65534)
    choose()
    choose(writable=False)
    """
    refused, reading = in_process(directory, body)
    assert refused["error"] == "StorageError"
    assert "EACCES" in str(refused["says"])
    assert reading["refusals"] == [] or reading["filesystem"] == "tmpfs"


def test_a_reader_writes_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a reader's probe wrote")

    monkeypatch.setattr(medium, "nameless_file", forbidden)
    assert choose_device(empty, writable=False).direct


def test_a_reader_tries_a_sample(empty: Path, tmp_path: Path, descriptors: None) -> None:
    sample = tmp_path / "sample"
    sample.write_bytes(os.urandom(10_000))
    tried = choose_device(empty, writable=False, sample=sample)
    assert tried == choose_device(empty)
    sample.write_bytes(b"shorter than a block")
    assert choose_device(empty, writable=False, sample=sample).direct
    with pytest.raises(StorageError, match="ENOENT"):
        choose_device(empty, writable=False, sample=tmp_path / "absent")


def test_a_full_disk_still_opens(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = medium.run_now
    monkeypatch.setattr(
        medium, "run_now", lambda opcode, *rest: -errno.ENOSPC if opcode == WRITE else plain(opcode, *rest)
    )
    choice = choose_device(empty)
    assert choice.direct
    assert any("ENOSPC" in line for line in choice.refusals)


# File systems.


def test_the_type_of_a_file_system() -> None:
    assert medium.filesystem_type("/proc") == "proc"
    assert medium.filesystem_type("/sys") == "sysfs"


def test_memory_gets_threads() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or medium.filesystem_type(str(shared)) != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    before = sorted(os.listdir(shared))
    choice = choose_device(shared)
    assert (choice.name, choice.direct, choice.filesystem, choice.network) == ("threads", False, "tmpfs", False)
    assert [line.split(":")[0] for line in choice.refusals] == ["O_DIRECT", "uring", "aio"]
    assert choose_device(shared, prefer="uring").direct is False
    assert [name for name in os.listdir(shared) if name not in before and "rewarm-probe" in name] == []


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "fuse", "ceph", "9p"])
def test_a_network_gets_threads(empty: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium, "filesystem_type", lambda directory: kind)
    choice = choose_device(empty)
    assert (choice.name, choice.direct, choice.network) == ("threads", True, True)
    assert [line.split(":")[0] for line in choice.refusals] == ["uring", "aio"]
    assert kind in choice.refusals[0]


def refuse_flags(monkeypatch: pytest.MonkeyPatch, flags: int, error: int) -> None:
    """`os.open` fails with `error` where all of `flags` are set."""
    plain = os.open

    def refusing(path: str, asked: int, *rest: int, **named: int) -> int:
        if asked & flags == flags:
            raise OSError(error, os.strerror(error))
        return plain(path, asked, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)


def test_o_direct_refused_at_open(empty: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    refuse_flags(monkeypatch, os.O_DIRECT, errno.EINVAL)
    choice = choose_device(empty)
    assert (choice.name, choice.direct, choice.alignment) == ("threads", False, 4096)
    assert choice.refusals[0] == "O_DIRECT: EINVAL (Invalid argument); the page cache is used"


def test_o_direct_refused_at_the_write(empty: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    plain = medium.run_now

    def refusing(opcode: int, fd: int, *rest: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        return -errno.EINVAL if direct and opcode != READ else plain(opcode, fd, *rest)

    monkeypatch.setattr(medium, "run_now", refusing)
    choice = choose_device(empty)
    assert (choice.name, choice.direct) == ("threads", False)
    assert "O_DIRECT: EINVAL" in choice.refusals[0]


def test_o_direct_denied_by_statx(empty: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    monkeypatch.setattr(medium, "direct_alignment", lambda fd: 0)
    choice = choose_device(empty)
    assert (choice.name, choice.direct) == ("threads", False)
    assert "statx" in choice.refusals[0]


@pytest.mark.parametrize("also", [0, os.O_DIRECT])
def test_without_nameless_files(empty: Path, also: int, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    refuse_flags(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    if also:
        refuse_flags(monkeypatch, also, errno.EINVAL)
    assert choose_device(empty).direct is not bool(also)


def test_a_medium_that_lies_is_refused(empty: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None) -> None:
    plain = medium.run_now

    def lying(opcode: int, fd: int, offset: int, address: int, length: int) -> int:
        result = plain(opcode, fd, offset, address, length)
        if opcode == READ:
            np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * length).from_address(address))[7] ^= 1
        return result

    monkeypatch.setattr(medium, "run_now", lying)
    with pytest.raises(StorageError, match="differ"):
        choose_device(empty)


@pytest.mark.parametrize(
    "broken",
    [lambda device: -errno.EIO, lambda device: 17, lambda device: None],
    ids=["an error", "a short result", "no completion"],
)
def test_a_rung_that_fails_its_probe_is_passed_over(
    empty: Path, broken: Callable[[object], int | None], monkeypatch: pytest.MonkeyPatch, descriptors: None
) -> None:
    class Broken(UringDevice):
        def reap(self, minimum: int = 1, timeout_s: float | None = None) -> np.ndarray:  # type: ignore[type-arg]
            found = super().reap(minimum, 0.0 if broken(self) is None else timeout_s)
            found["result"][:] = broken(self) or 0
            return found[:0] if broken(self) is None else found

    monkeypatch.setitem(select.LADDER, "uring", Broken)
    choice = choose_device(empty)
    assert choice.name == "aio"
    assert choice.refusals[0].startswith("uring: ")


def test_describe_names_the_error() -> None:
    assert kernel.describe(-errno.EPERM) == "EPERM (Operation not permitted)"
    assert "9999" in kernel.describe(9999)
