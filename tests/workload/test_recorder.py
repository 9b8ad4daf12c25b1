"""Recording beside an engine: what is written is read as a trace, nothing waits, and what is lost is counted."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rewarm.errors import ConfigError, StorageError
from rewarm.workload import open_trace, recorder
from rewarm.workload.recorder import Recorder

KEYS = [bytes([number]) * 36 for number in range(6)]


def test_a_recording_is_a_trace_without_the_keys(tmp_path: Path) -> None:
    recording = Recorder(tmp_path / "day.jsonl", 16)
    recording.lookup(KEYS[:3], 50)
    recording.save(KEYS[:3])
    recording.lookup(KEYS[:2] + KEYS[4:], 70)
    recording.close()
    assert (recording.dropped, recording.failure) == (0, None)
    text = recording.path.read_bytes()
    assert not any(key in text or key.hex().encode() in text for key in KEYS)
    (batch,) = open_trace(recording.path).batches()
    assert batch.input_tokens.tolist() == [50, 70]
    first, second = batch.blocks[:3].tolist(), batch.blocks[3:].tolist()
    assert second[:2] == first[:2], "equal keys stay equal"
    assert len({*first, *second}) == 5
    assert recording.path.stat().st_mode & 0o077 == 0


def test_a_second_recording_has_other_hashes_and_a_name_of_its_own(tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        recording = Recorder(tmp_path / "day.jsonl", 16)
        recording.lookup(KEYS, 96)
        recording.close()
        paths.append(recording.path)
    assert [path.name for path in paths] == ["day.jsonl", "day-2.jsonl"]
    blocks = [next(iter(open_trace(path).batches())).blocks.tolist() for path in paths]
    assert not set(blocks[0]) & set(blocks[1])


def test_a_thread_that_does_not_keep_up_costs_events_and_never_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "QUEUE_MAX", 3)
    gate, begun = threading.Event(), threading.Event()
    recording = Recorder(tmp_path / "r.jsonl", 16)

    def wait(*arguments: object) -> None:
        begun.set()
        gate.wait(20)

    monkeypatch.setattr(recording._writer, "save", wait)
    recording.save(KEYS)
    assert begun.wait(20)
    for _ in range(10):
        recording.lookup(KEYS, 96)
    assert recording.dropped == 7
    gate.set()
    recording.close()
    assert len(next(iter(open_trace(recording.path).batches())).input_tokens) == 3


def test_a_file_that_cannot_be_written_ends_the_recording_not_the_engine(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot record to"):
        Recorder(tmp_path / "missing" / "r.jsonl", 16)
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this machine")
    recording = Recorder(tmp_path / "r.jsonl", 16)
    recording._stream.close()
    recording._stream = open(full, "wb", buffering=0)  # noqa: SIM115
    recording.save(KEYS)
    recording.close()
    assert recording.failure is not None
    recording.lookup(KEYS, 96)
    assert recording.dropped == 1


def test_what_was_asked_is_in_the_file_while_the_engine_runs(tmp_path: Path) -> None:
    """vLLM kills its core at the end: nothing may wait for `close`, and a line cut short costs only itself."""
    recording = Recorder(tmp_path / "r.jsonl", 16)
    for _ in range(3):
        recording.lookup(KEYS, 96)
    end_s = time.monotonic() + 20
    while recording.path.read_bytes().count(b"\n") < 4 and time.monotonic() < end_s:
        time.sleep(0.001)
    whole = recording.path.read_bytes()
    recording.close()
    cut = tmp_path / "cut.jsonl"
    for bytes_lost, requests in ((0, 3), (1, 3), (2, 2), (40, 2)):
        cut.write_bytes(whole[: len(whole) - bytes_lost])
        assert len(next(iter(open_trace(cut).batches())).input_tokens) == requests
    cut.write_bytes(whole[:60] + whole[100:])
    with pytest.raises(ConfigError, match=r"cut\.jsonl:2"):
        open_trace(cut).load()
