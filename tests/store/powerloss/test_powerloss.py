"""After every power loss: the pool opens, what a sync has covered is there, every hit is right, and the pool is usable.

Simulated over the real format (see `recorder.py` and `losses.py`), and once on a real file system.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from tests.lengths import repeated
from tests.store.powerloss.lives import CAPACITY, NAMESPACE, WAIT_S, Recording, block, record, size_of
from tests.store.powerloss.losses import lose_power
from tests.store.powerloss.recorder import Recorder

from rewarm.store.contract import Outcome
from rewarm.store.opening import open_store, repair_pool_file
from rewarm.testing import make_keys

RECORDINGS = [("", False), ("", True), ("&device=threads", False), ("&device=aio", True)]
LOSSES = repeated(200, 1000)
LOSSES_QUICK = 24


def survive(root: Path, recording: Recording, moment: int) -> int:
    """Open what a power loss has left and ask for everything; returns the hits."""
    must_hold = recording.must_hold(moment)
    if not (root / "pool.json").exists():
        assert not must_hold
        return 0
    with open_store(f"file://{root}?poll=1h", namespace=NAMESPACE) as store:
        keys = recording.keys
        buffers = [bytearray(size_of(key)) for key in keys]
        transfer = store.load(keys, buffers)
        transfer.wait(WAIT_S)
        for key, buffer, outcome in zip(keys, buffers, transfer.outcomes, strict=True):
            assert outcome in (Outcome.HIT, Outcome.MISSING, Outcome.CORRUPT), outcome
            assert outcome is not Outcome.HIT or buffer == block(key), "a wrong byte was served"
        hits = {key for key, outcome in zip(keys, transfer.outcomes, strict=True) if outcome is Outcome.HIT}
        assert must_hold <= hits, f"{len(must_hold - hits)} of {len(must_hold)} synced blocks are lost"
        again = sorted(set(keys) - hits)[:3] + make_keys(1, "after")
        assert all(store.save(again, [block(key) for key in again]).wait(WAIT_S)), "the pool cannot be used"
        if moment % 8 == 0:
            store.check(fix=True)
            report = store.check()
            assert report.clean, report.findings
    return len(hits)


def lose_many(folder: Path, count: int, seed: int) -> None:
    dice = random.Random(seed)
    hits = promised = 0
    for number, (options, evicting) in enumerate(RECORDINGS):
        home = folder / str(number)
        home.mkdir()
        recording = record(home, seed + number, options, evicting=evicting)
        assert recording.keys
        for turn in range(count // len(RECORDINGS)):
            moment = dice.randint(0, recording.trace.clock)
            remains = folder / f"{number}-{turn}"
            lose_power(recording.trace, moment, dice, remains)
            hits += survive(remains, recording, moment)
            promised += len(recording.must_hold(moment))
            shutil.rmtree(remains)
    assert promised > count, "hardly anything was promised"
    assert hits > promised, "nothing that was not synced has survived: the dice are loaded"


def test_some_power_losses(tmp_path: Path) -> None:
    lose_many(tmp_path, LOSSES_QUICK, seed=1)


@pytest.mark.crash
def test_many_power_losses(tmp_path: Path) -> None:
    lose_many(tmp_path, LOSSES, seed=2)


def test_a_seal_syncs_what_the_log_says_of_it(tmp_path: Path) -> None:
    """Without a flush, a power loss costs what was saved since the last seal."""
    recorder = Recorder(tmp_path)
    with recorder.recording():
        url = f"file://{tmp_path}?capacity={CAPACITY}&poll=1h"
        with open_store(url, namespace=NAMESPACE, write_device_wrapper=recorder.wrap) as store:
            for turn in range(12):
                keys = make_keys(5, str(turn))
                assert all(store.save(keys, [block(key) for key in keys]).wait(WAIT_S))
            moment = recorder.trace.clock
    logs = [changes[0].inode for name, changes in recorder.trace.names.items() if name.endswith(".log")]
    syncs = [sync for log in logs for sync in recorder.trace.syncs[log or 0] if sync.done <= moment]
    sealed = sum(name.endswith(".seg") for name in recorder.trace.names) - 1
    assert sealed > 3
    assert len(syncs) >= sealed // 2, "the last may still be under way"


def test_what_a_recording_leaves_at_its_end_is_the_pool(tmp_path: Path) -> None:
    """The recorder misses nothing: applied whole, its trace is the directory, byte by byte."""
    home = tmp_path / "home"
    home.mkdir()
    recording = record(home, 3, "", evicting=True)
    trace = recording.trace
    for changes in (*trace.directory_syncs.values(), *trace.syncs.values()):
        changes[:] = []
    every = type(trace.names["pool.json"][0])(trace.clock + 1, trace.clock + 2)
    for syncs in trace.syncs.values():
        syncs.append(every)
    for path in {str(Path(name).parent) for name in trace.names}:
        trace.directory_syncs[path] = [every]
    lose_power(trace, trace.clock + 2, random.Random(0), tmp_path / "copy")
    expected = {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*") if p.is_file()}
    copied = tmp_path / "copy"
    assert {str(p.relative_to(copied)): p.read_bytes() for p in copied.rglob("*") if p.is_file()} == expected


def test_a_store_that_promises_too_early_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: without its syncs the store loses what it has promised."""
    monkeypatch.setattr("rewarm.store.appending.Appender.flush", lambda self: 0)
    with pytest.raises(AssertionError, match="synced blocks are lost"):
        lose_many(tmp_path, LOSSES_QUICK, seed=1)


def test_a_lost_pool_file_is_rebuilt(tmp_path: Path) -> None:
    record(tmp_path, 5, "", evicting=False)
    (tmp_path / "pool.json").write_bytes(b"")
    assert repair_pool_file(f"file://{tmp_path}")
