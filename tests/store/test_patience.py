"""A file system that does not answer: every call ends within its bound, and everything goes on when it is back."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.store.faulty_store import WAIT_S
from tests.store.test_tailing import load, open_pool, save

from rewarm.errors import MisuseError, StorageError
from rewarm.store import pool
from rewarm.store.contract import Outcome
from rewarm.store.opening import open_store
from rewarm.store.patience import Mount
from rewarm.testing import make_keys, payload

HIT, STORED, TIMED_OUT = Outcome.HIT, Outcome.STORED, Outcome.TIMED_OUT
OPTIONS = "&poll=1h&io_deadline=1s&close_timeout=500ms"


class DeadMount:
    """Calls of `os` that hang while the mount is dead."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.answers = threading.Event()
        self.answers.set()

    def kill(self, *names: str) -> None:
        """These calls hang from now on."""
        self.answers.clear()
        for name in names:
            call = getattr(os, name)

            def hang(*args: Any, call: Any = call, **more: Any) -> Any:
                self.answers.wait(WAIT_S)
                return call(*args, **more)

            self._patch.setattr(os, name, hang)

    def revive(self) -> None:
        """What hangs goes on."""
        self.answers.set()


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadMount]:
    dead = DeadMount(monkeypatch)
    yield dead
    dead.revive()


def test_verbs_that_look_at_the_directory_end(tmp_path: Path, mount: DeadMount) -> None:
    keys = make_keys(3)
    with open_pool(tmp_path, OPTIONS) as store:
        assert save(store, keys) == [STORED] * 3
        mount.kill("scandir")
        verbs = (store.refresh, store.check, lambda: store.evict(0), store.erase)
        with ThreadPoolExecutor(len(verbs)) as threads:
            for asked in [threads.submit(verb) for verb in verbs]:
                with pytest.raises(StorageError, match="has not answered for 1 s"):
                    asked.result(WAIT_S)
        assert store.lookup(keys).leading == 3, "memory answers"
        assert load(store, keys) == [HIT] * 3, "and so do files that are open"
        assert store.stats().blocks == 3
        mount.revive()
        store.refresh()
        assert load(store, keys) == [HIT] * 3


def test_open_ends(tmp_path: Path, mount: DeadMount) -> None:
    open_pool(tmp_path).close()
    mount.kill("access")
    with pytest.raises(StorageError, match=r"cannot open .*: the file system has not answered for 1 s"):
        open_store(f"file://{tmp_path}?io_deadline=1s")


def test_a_save_whose_log_hangs_gets_a_verdict_and_a_flush_an_error(tmp_path: Path, mount: DeadMount) -> None:
    keys = make_keys(2)
    with open_pool(tmp_path, OPTIONS) as store:
        assert save(store, keys[:1]) == [STORED]
        mount.kill("pwritev")
        transfer = store.save(keys[1:], [payload(keys[1], 5000)])
        assert transfer.wait(WAIT_S) == [False]
        assert transfer.outcomes == [TIMED_OUT]
        assert not transfer.released(), "the loop may still read it"
        with pytest.raises(StorageError, match="has not answered"):
            store.flush()
        mount.revive()
        assert transfer.wait_released(WAIT_S)
        store.flush()
        assert load(store, keys) == [HIT] * 2, "it arrived after all"


def test_a_load_whose_file_hangs_to_open_gets_a_verdict(tmp_path: Path, mount: DeadMount) -> None:
    keys = make_keys(2)
    with open_pool(tmp_path) as store:
        assert save(store, keys) == [STORED] * 2
    with open_pool(tmp_path, OPTIONS) as store:
        mount.kill("open")
        transfer = store.load(keys, [bytearray(5000) for _ in keys])
        assert transfer.wait(WAIT_S) == [False] * 2
        assert transfer.outcomes == [TIMED_OUT] * 2
        mount.revive()
        assert transfer.wait_released(WAIT_S)
        assert load(store, keys) == [HIT] * 2


def test_close_ends(tmp_path: Path, mount: DeadMount) -> None:
    store = open_pool(tmp_path, OPTIONS)
    assert save(store, make_keys(1)) == [STORED]
    mount.kill("pwritev", "fdatasync")
    store.close()
    with pytest.raises(MisuseError):
        store.refresh()


def test_a_call_that_shows_progress_may_take_longer() -> None:
    mount, pause = Mount(0.2), threading.Event()
    heard = [time.monotonic()]

    def work() -> int:
        for _ in range(10):
            pause.wait(0.05)
            heard[0] = time.monotonic()
        return 7

    assert mount.call(work, alive_s=lambda: heard[0]) == 7
    with pytest.raises(TimeoutError):
        mount.call(work)
    with pytest.raises(TimeoutError, match="mine"):
        mount.call(lambda: (_ for _ in ()).throw(TimeoutError("mine")), deadline_s=WAIT_S)
    mount.end()
    assert mount.call(lambda: 8, deadline_s=WAIT_S) == 8, "what comes late is run all the same"


def test_no_thread_is_a_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StorageError, match="can't start new thread"):
        open_pool(tmp_path)
    assert not (tmp_path / pool.POOL_FILE).exists()


def hang_in(monkeypatch: pytest.MonkeyPatch, mount: DeadMount, log: Path) -> threading.Event:
    """Reads of one log hang while the mount is dead; the event says that one does."""
    preadv, hangs = os.preadv, threading.Event()
    inode = log.stat().st_ino

    def hang(descriptor: int, *args: Any) -> int:
        if os.fstat(descriptor).st_ino == inode and not mount.answers.is_set():
            hangs.set()
            assert mount.answers.wait(WAIT_S)
        return preadv(descriptor, *args)

    monkeypatch.setattr(os, "preadv", hang)
    mount.answers.clear()
    return hangs


def must_fail(verb: Callable[[], None]) -> None:
    """The verb says that the medium does not answer."""
    with pytest.raises(StorageError):
        verb()


def test_a_log_that_hangs_keeps_nobody_from_saving_nor_from_opening(
    tmp_path: Path, mount: DeadMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, own, late = (make_keys(2, tag) for tag in ("lost", "own", "late"))
    with open_pool(tmp_path, "&lease=1h") as writer, open_pool(tmp_path, f"{OPTIONS}&lease=1h") as other:
        assert save(writer, lost) == [STORED] * 2
        other.refresh()
        (log,) = tmp_path.glob("writers/*/*.log")
        hangs = hang_in(monkeypatch, mount, log)
        reading = threading.Thread(target=must_fail, args=(other.refresh,))
        reading.start()
        assert hangs.wait(WAIT_S)
        assert save(other, own) == [STORED] * 2, "room is made without a look at the log that hangs"
        with open_pool(tmp_path, OPTIONS) as fresh:
            assert save(fresh, late) == [STORED] * 2
            mount.revive()
            fresh.refresh()
            assert load(fresh, [*lost, *own]) == [HIT] * 4
        reading.join(WAIT_S)
        other.refresh()
        assert load(other, late) == [HIT] * 2


def test_a_log_that_could_not_be_read_is_read_last_and_its_writer_taken_for_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, asked, broken = os.preadv, list[int](), set[int]()

    def read(descriptor: int, *args: Any) -> int:
        inode = os.fstat(descriptor).st_ino
        asked.append(inode)
        if inode in broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, *args)

    with contextlib.ExitStack() as stack:
        for tag in ("first", "second"):
            assert save(stack.enter_context(open_pool(tmp_path, OPTIONS)), make_keys(1, tag)) == [STORED]
        reader = stack.enter_context(open_pool(tmp_path, OPTIONS))
        monkeypatch.setattr(os, "preadv", read)
        for log in tmp_path.glob("writers/*/*.log"):
            broken.clear()
            broken.add(log.stat().st_ino)
            reader.refresh()
            assert not reader._tailer.silent(log.parent.name, 0.0)
            asked.clear()
            reader.refresh()
            assert asked[-1] in broken
            assert len(set(asked)) == 2
            assert reader.stats().notes == ["1 logs could not be read"]
