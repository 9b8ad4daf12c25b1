"""Real I/O processes: stopped, killed, left alone. Never a wrong byte, never a wait for ever, memory only when it is
provably nobody's."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.store.process.helpers import (
    SIZE,
    WAIT_S,
    arena_of,
    check_rows,
    eventually,
    open_with_process,
    process_of,
    ready,
    saved,
)

from rewarm.errors import MisuseError
from rewarm.store.contract import Outcome
from rewarm.store.file import FileStore
from rewarm.store.process import witness
from rewarm.testing import make_keys, payload

UNTOUCHED = 0xA5


def pid_of(store: FileStore) -> int:
    return process_of(store).pid


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_process_is_replaced_by_the_thread(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pid_of(store), number)
        assert all(store.load(keys, arena[:16]).wait(WAIT_S)), "it leaves such signals to us"
        assert store._restorer._by_thread == 0
        transfers = [store.load(keys, arena[16 * n : 16 * n + 16]) for n in range(4)]
        os.kill(pid_of(store), signal.SIGKILL)
        for number, transfer in enumerate(transfers):
            assert all(transfer.wait(WAIT_S)), "what it had not read is read again"
            assert transfer.wait_released(WAIT_S)
            check_rows(arena[16 * number : 16 * number + 16], keys)
        eventually(lambda: process_of(store).ended)
        assert all(store.load(keys, arena[:16]).wait(WAIT_S))
        assert store.stats().unreleased_bytes == 0
        assert any("signal 9" in note for note in store.stats().notes)


@pytest.mark.crash
def test_memory_of_a_dead_process_is_given_back_only_with_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = [True]
    monkeypatch.setattr("rewarm.store.process.engine.in_use", lambda path, token: in_use[0])
    with ready(tmp_path, options="&io_deadline=1s") as (store, arena):
        keys = saved(store, 16)
        os.kill(pid_of(store), signal.SIGSTOP)
        transfer = store.load(keys, arena[:16])
        os.kill(pid_of(store), signal.SIGKILL)
        eventually(lambda: process_of(store).ended)
        assert transfer.wait(WAIT_S) == [False] * 16
        assert set(transfer.outcomes) == {Outcome.TIMED_OUT}, "by the deadline: nobody else may read into it"
        assert not transfer.released()
        assert store.stats().unreleased_bytes == 16 * SIZE
        assert all(store.load(keys, arena[16:32]).wait(WAIT_S)), "the store goes on"
        in_use[0] = False
        assert transfer.wait_released(WAIT_S)
        assert store.stats().unreleased_bytes == 0


@pytest.mark.crash
def test_without_a_way_to_prove_it_the_memory_is_never_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(path: Path, token: int) -> bool:
        raise FileNotFoundError(path)

    monkeypatch.setattr("rewarm.store.process.engine.in_use", unknown)
    store = open_with_process(tmp_path, "&close_timeout=1s")
    arena = arena_of(32)
    store.register(arena)
    keys = saved(store, 16)
    os.kill(pid_of(store), signal.SIGSTOP)
    transfer = store.load(keys, arena[:16])
    os.kill(pid_of(store), signal.SIGKILL)
    assert transfer.wait(WAIT_S) == [False] * 16
    assert set(transfer.outcomes) == {Outcome.LOST_MEDIUM}
    start_s = time.monotonic()
    store.close()
    assert time.monotonic() - start_s < 10
    assert not transfer.released()
    assert store.stats().unreleased_bytes == 16 * SIZE


@pytest.mark.crash
def test_a_stopped_process_settles_nothing_and_keeps_its_memory(tmp_path: Path) -> None:
    with ready(tmp_path, options="&io_deadline=1s") as (store, arena):
        keys = saved(store, 16)
        assert all(store.load(keys, arena[:16]).wait(WAIT_S))
        arena[:16] = UNTOUCHED
        os.kill(pid_of(store), signal.SIGSTOP)
        transfer = store.load(keys, arena[:16])
        transfer.wait(WAIT_S)
        assert set(transfer.outcomes) == {Outcome.TIMED_OUT}
        assert not transfer.released()
        assert store.stats().unreleased_bytes == 16 * SIZE
        eventually(process_of(store).silent)
        assert all(store.load(keys, arena[16:32]).wait(WAIT_S)), "others go through the thread"
        os.kill(pid_of(store), signal.SIGCONT)
        assert transfer.wait_released(WAIT_S)
        assert set(transfer.outcomes) == {Outcome.TIMED_OUT}, "a verdict is given once"
        eventually(lambda: not process_of(store).silent())
        before = store._restorer._by_thread
        assert all(store.load(keys, arena[:16]).wait(WAIT_S))
        check_rows(arena[:16], keys)
        assert store._restorer._by_thread == before, "it is used again"
        assert store.stats().unreleased_bytes == 0


@pytest.mark.crash
def test_closing_beside_a_stopped_process_is_bounded(tmp_path: Path) -> None:
    with ready(tmp_path, options="&close_timeout=1s") as (store, arena):
        keys = saved(store, 4)
        pid = pid_of(store)
        os.kill(pid, signal.SIGSTOP)
        transfer = store.load(keys, arena[:4])
        start_s = time.monotonic()
        store.close()
        assert time.monotonic() - start_s < 10
        assert set(transfer.outcomes) == {Outcome.CANCELLED}
        assert transfer.wait_released(WAIT_S), "killed, with no file of it in use"
        eventually(lambda: gone(pid))


@pytest.mark.crash
def test_a_witness_holds_while_anything_uses_the_file(tmp_path: Path) -> None:
    path, token = tmp_path / "file", witness.new_token()
    path.write_bytes(b"x")
    descriptor = os.open(path, os.O_RDONLY)
    assert not witness.in_use(path, token)
    witness.bear_witness(descriptor, token)
    assert witness.in_use(path, token)
    assert not witness.in_use(path, token + 1), "each process has a byte of its own"
    other = os.dup(descriptor)
    os.close(descriptor)
    assert witness.in_use(path, token), "as a read in the kernel does"
    os.close(other)
    assert not witness.in_use(path, token)
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the writers' locks are others


@pytest.mark.crash
def test_it_ends_with_an_engine_that_is_killed_whoever_was_forked(tmp_path: Path) -> None:
    script = f"""
import os, sys, time
from pathlib import Path
from tests.store.process.helpers import process_of, ready
with ready(Path({str(tmp_path)!r})) as (store, arena):
    if os.fork() == 0:
        time.sleep(600)  # keeps what a fork inherits
    print(process_of(store).pid, flush=True)
    time.sleep(600)
"""
    root = str(Path(__file__).parents[3])
    engine = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root, start_new_session=True, text=True
    )
    try:
        assert engine.stdout
        pid = int(engine.stdout.readline())
        assert not gone(pid)
        engine.kill()
        eventually(lambda: gone(pid), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
        assert engine.stdout
        engine.stdout.close()


@pytest.mark.crash
def test_evicted_bytes_are_freed_though_it_had_the_files_open(tmp_path: Path) -> None:
    with ready(tmp_path, options="&poll=20ms") as (store, arena):
        keys = saved(store, 48)
        store.flush()
        assert all(store.load(keys, arena[:48]).wait(WAIT_S))
        files = Path(f"/proc/{pid_of(store)}/fd")

        def open_segments() -> list[str]:
            found = []
            for link in files.iterdir():
                with contextlib.suppress(OSError):
                    found.append(os.readlink(link))
            return [name for name in found if ".seg" in name]

        assert open_segments()
        store.erase()
        eventually(lambda: not open_segments(), 10)


@pytest.mark.crash
def test_a_forked_process_uses_nothing_of_it(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 4)
        child = os.fork()
        if child == 0:
            refused = False
            try:
                store.load(keys, arena[:4])
            except MisuseError:
                refused = True
            store.close()
            os._exit(0 if refused else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert all(store.load(keys, arena[:4]).wait(WAIT_S))
        assert store._restorer._by_thread == 0


def resources(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads (without those of the kernel's rings, which come and go) and resident MiB of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
    ours = sum(not name.startswith("iou-") for name in threads)
    return len(os.listdir(f"/proc/{pid}/fd")), ours, int(status["RssAnon"].split()[0]) >> 10


@pytest.mark.crash
def test_many_rounds_leave_everything_where_it_was(tmp_path: Path) -> None:
    with ready(tmp_path) as (store, arena):
        keys = saved(store, 64, 4096)
        rows = arena.reshape(-1)[: 64 * 4096].reshape(64, 4096)

        def rounds(count: int) -> list[tuple[int, int, int]]:
            for _ in range(count):
                assert all(store.load(keys, rows).wait(WAIT_S))
            gc.collect()
            return [resources(pid) for pid in (os.getpid(), pid_of(store))]

        before, after = rounds(100), rounds(600)
        for (files, threads, mib), (files_after, threads_after, mib_after) in zip(before, after, strict=True):
            assert (files_after, threads_after) == (files, threads)
            assert mib_after <= mib + 4
        assert process_of(store).outstanding() == 0
        assert store._restorer._by_thread == 0


@pytest.mark.crash
def test_everything_at_once_while_it_is_stopped_and_killed(tmp_path: Path) -> None:
    """Loads from several threads, evictions and erasures, and a process that is stopped, continued, and killed."""
    wrong: list[BaseException] = []
    with ready(tmp_path, blocks=128, options="&poll=20ms&io_deadline=2s") as (store, arena):
        pid, end_s = pid_of(store), time.monotonic() + 8
        keys = make_keys(200)

        def work(number: int) -> None:
            dice, rows = random.Random(number), arena[32 * number : 32 * number + 32]
            try:
                while time.monotonic() < end_s:
                    some = dice.sample(keys, 32)
                    store.save(some, [payload(key, SIZE) for key in some]).wait(WAIT_S)
                    transfer = store.load(some, rows)
                    transfer.wait(dice.choice([WAIT_S, 0.001]))
                    assert transfer.wait_released(WAIT_S)
                    for row, key, outcome in zip(rows, some, transfer.outcomes, strict=True):
                        assert outcome is not Outcome.HIT or bytes(row) == payload(key, SIZE), "wrong bytes"
                    # Not shortly before the kill: of a file that is gone nobody can prove that it is out of use,
                    # so that what a dead process was reading from it stays borrowed for good.
                    if dice.random() < 0.05 and time.monotonic() < end_s - 5:
                        store.erase()
            except BaseException as error:  # noqa: BLE001 told to the test
                wrong.append(error)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        while time.monotonic() < end_s - 2:
            for what in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, what)
                time.sleep(0.15)
        os.kill(pid, signal.SIGKILL)
        for worker in workers:
            worker.join(3 * WAIT_S)
            assert not worker.is_alive()
        assert wrong == []
        assert store.stats().unreleased_bytes == 0
        assert not [note for note in store.stats().notes if note.startswith("rewarm-")]
    assert isinstance(arena, np.ndarray)
