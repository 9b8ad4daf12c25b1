"""Every trace format: what is read, and what is refused with its place."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewarm.errors import ConfigError
from rewarm.workload import open_trace
from rewarm.workload import requests as requests_module
from rewarm.workload.formats.recording import TraceWriter


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(time_ms: float, tokens: int, ids: list[int], output: int = 5) -> dict[str, Any]:
    return {"timestamp": time_ms, "input_length": tokens, "output_length": output, "hash_ids": ids}


def session(name: str, requests: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **extra}


def turn(t: float, tokens: int, ids: list[int]) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 3, "hash_ids": ids, "stop": "", "think_time": 0.0}


def test_mooncake(tmp_path: Path) -> None:
    trace = open_trace(lines(tmp_path / "a.jsonl", [mooncake(5000, 600, [1, 2]), mooncake(8500, 100, [1], 7)]))
    found = trace.load()
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert found.arrival_s.tolist() == [0.0, 3.5]
    assert found.input_tokens.tolist() == [600, 100]
    assert found.output_tokens.tolist() == [5, 7]
    assert found.blocks.tolist() == [1, 2, 1]
    assert found.block_tokens_of(512).tolist() == [512, 88, 100]


def test_mooncake_with_a_block_size_of_its_own(tmp_path: Path) -> None:
    trace = open_trace(lines(tmp_path / "a.jsonl", [mooncake(0, 128, [1, 2]) | {"block_size": 64}]))
    assert trace.block_tokens == 64
    assert len(trace.load().blocks) == 2


def test_gzip_is_read_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(mooncake(0, 600, [1, 2])).encode()))
    assert open_trace(path).load().input_tokens.tolist() == [600]
    path.write_bytes(gzip.compress(json.dumps(mooncake(0, 600, [1, 2])).encode())[:-9])
    with pytest.raises(ConfigError, match="cannot be read as text"):
        open_trace(path).load()


def test_agent_sessions_keep_their_block_ids_apart(tmp_path: Path) -> None:
    lines(tmp_path / "one.json", [session("one", [turn(0, 130, [1, 2]), turn(9, 200, [1, 2, 3])])])
    (tmp_path / "two.json").write_text(json.dumps(session("two", [turn(4, 70, [1])]), indent=2))
    trace = open_trace(tmp_path)
    found = trace.load()
    assert (trace.format, trace.block_tokens) == ("agent-sessions", 64)
    assert found.arrival_s.tolist() == [0.0, 4.0, 9.0]
    assert found.session.tolist() == [0, 1, 0]
    assert len(set(found.blocks.tolist())) == 4
    assert "local to each session file" in trace.notes[0]
    single = open_trace(tmp_path / "two.json").load()
    assert single.input_tokens.tolist() == [70]


def test_agent_sessions_with_global_ids_share_blocks(tmp_path: Path) -> None:
    for name in ("one", "two"):
        lines(tmp_path / f"{name}.json", [session(name, [turn(0, 70, [1])], hash_id_scope="global")])
    assert len(set(open_trace(tmp_path).load().blocks.tolist())) == 1


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
        "2024-05-10 00:00:00.009930+00:00,9,1\n"
    )
    trace = open_trace(path)
    found = trace.load()
    assert trace.block_tokens is None
    assert found.arrival_s[:2] == pytest.approx([0, 0.052], abs=1e-4)
    assert found.input_tokens.tolist() == [4808, 3180, 9]
    assert len(found.blocks) == 0


def lookup(time_s: float, tokens: int, names: list[str], chunk: int = 256) -> dict[str, Any]:
    return {"timestamp": time_s, "request_id": "r", "model_name": "m", "chunk_size": chunk, "seq_len": tokens,
            "dtypes": ["bf16"], "shapes": [[1]], "chunk_hashes": names}  # fmt: skip


def test_lmcache_lookup_hashes_of_a_rotated_log(tmp_path: Path) -> None:
    lines(tmp_path / "lookup_hashes_1.jsonl", [lookup(1e9, 600, ["0xa", "0xb"])])
    lines(tmp_path / "lookup_hashes_2.jsonl", [lookup(1e9 + 2, 300, ["0xa"])])
    trace = open_trace(tmp_path)
    found = trace.load()
    assert (trace.format, trace.block_tokens) == ("lmcache-lookups", 256)
    assert found.arrival_s.tolist() == [0.0, 2.0]
    assert found.blocks[0] == found.blocks[2]
    assert found.blocks[0] != found.blocks[1]


LOG = """(EngineCore_0 pid=3) INFO 08-21 07:17:09 [scheduler.py:495] starting
(EngineCore_0 pid=3) [2025-08-21 07:17:09,753] LMCache INFO: Reqid: cmpl-1, Total tokens 8891, LMCache hit tokens: None.
(EngineCore_0 pid=3) [2025-08-21 07:17:09,753] LMCache INFO: Reqid: cmpl-1, Total tokens 8891, LMCache hit tokens: 8704, need to load: 8704 (vllm_v1_adapter.py:1050)
(EngineCore_0 pid=3) [2025-08-21 07:17:09,900] LMCache INFO: Reqid: cmpl-1, Total tokens 8891, LMCache hit tokens: 8704, need to load: 8704 (vllm_v1_adapter.py:1050)
(EngineCore_0 pid=3) [2026-02-04 13:55:39,651] LMCache INFO: Reqid: b, Total tokens 713, Inference Engine computed tokens: 64, LMCache hit tokens: 512, need to load: 448
"""  # noqa: E501


def test_lookup_lines_of_a_vllm_server_with_lmcache(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG)
    trace = open_trace(path)
    found = trace.load()
    assert trace.format == "lmcache-log"
    assert found.input_tokens.tolist() == [8891, 713]
    assert found.hit_tokens.tolist() == [8704, 512]


def test_a_recording_is_read_back_and_hides_its_keys(tmp_path: Path) -> None:
    keys = [bytes([k]) * 32 for k in range(3)]
    stream = io.BytesIO()
    writer = TraceWriter(stream, 64)
    writer.lookup(0.5, keys[:2], 130, output_tokens=9, session=4)
    writer.save(0.6, keys[:2])
    writer.lookup(2.0, keys, 200, hit_tokens=128)
    path = tmp_path / "a.jsonl"
    path.write_bytes(stream.getvalue())
    trace = open_trace(path)
    found = trace.load()
    assert (trace.format, trace.block_tokens) == ("rewarm", 64)
    assert found.arrival_s.tolist() == [0.0, 1.5]
    assert found.session.tolist() == [4, -1]
    assert found.hit_tokens.tolist() == [-1, 128]
    assert found.blocks[:2].tolist() == found.blocks[2:4].tolist()
    assert keys[0].hex() not in path.read_text()
    again = io.BytesIO()
    TraceWriter(again, 64).lookup(0.5, keys[:2], 130, output_tokens=9, session=4)
    assert again.getvalue().splitlines()[1] != stream.getvalue().splitlines()[1], "another secret, other names"


def test_batches_are_bounded_and_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "BATCH_BLOCKS", 4)
    rows = [mooncake(1000 * k, 1500, [3 * k, 3 * k + 1, 3 * k + 2]) for k in range(5)]
    trace = open_trace(lines(tmp_path / "a.jsonl", rows))
    sizes = [len(batch.blocks) for batch in trace.batches()]
    assert sizes == [6, 6, 3]
    whole = trace.load()
    assert whole.blocks.tolist() == list(range(15))
    assert whole.offsets.tolist() == [0, 3, 6, 9, 12, 15]
    assert np.diff(whole.arrival_s).tolist() == [1.0] * 4


REFUSED = {
    "time goes back": ([mooncake(2000, 10, [1]), mooncake(1000, 10, [1])], r"a\.jsonl:2: the arrival time goes back"),
    "no input": ([mooncake(0, 0, [])], r"a\.jsonl:1: input tokens are 0; allowed are 1"),
    "negative output": ([mooncake(0, 5, [1], -1)], "output tokens are -1"),
    "more blocks than tokens": ([mooncake(0, 512, [1, 2])], "2 blocks for 512 input tokens"),
    "not a number": ([mooncake(0, 5, [1]), {"timestamp": 1, "input_length": "x"}], r"a\.jsonl:2: .*input_length"),
    "negative id": ([mooncake(0, 5, [1]), mooncake(0, 5, [-1])], r"a\.jsonl:2: block ids are -1 to -1"),
    "unknown": ([{"prompt": "hello"}], "not a trace of a known format; known are Mooncake"),
    "session back in time": ([session("s", [turn(5, 70, [1]), turn(4, 70, [1])])], "request 2: t goes back"),
    "session block size": ([session("s", [], block_size=0)], "block_size is 0"),
    "session scope": ([session("s", [turn(0, 70, [1])], hash_id_scope="planet")], "known are 'local' and 'global'"),
    "session without requests": ([session("s", [])], "the trace has no requests"),
    "chunk size": ([lookup(0, 10, [], chunk=0)], "chunk_size is 0"),
    "chunk sizes": ([lookup(0, 10, []), lookup(1, 10, [], chunk=64)], "differs from 256"),
    "recording version": ([{"rewarm_trace": 2, "block_tokens": 64}], "rewarm_trace is 2; this version reads 1"),
    "recording op": ([{"rewarm_trace": 1, "block_tokens": 64}, {"t": 0, "op": "x", "keys": []}], "op is 'x'"),
    "recording key": (
        [{"rewarm_trace": 1, "block_tokens": 64}, {"t": 0, "op": "lookup", "keys": ["zz"], "input_tokens": 5}],
        "'zz' is not hexadecimal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trace_that_cannot_be_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    rows, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        open_trace(lines(tmp_path / "a.jsonl", rows)).load()


def test_files_that_are_no_text_or_empty_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        open_trace(tmp_path / "a.bin")
    (tmp_path / "b.jsonl").write_text("\n \n")
    with pytest.raises(ConfigError, match="the file is empty"):
        open_trace(tmp_path / "b.jsonl")
    with pytest.raises(FileNotFoundError):
        open_trace(tmp_path / "c.jsonl")
    (tmp_path / "d.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,x,10\n")
    with pytest.raises(ConfigError, match=r"d\.csv:2: not a row of"):
        open_trace(tmp_path / "d.csv").load()


def test_a_directory_of_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no trace files"):
        open_trace(tmp_path)
    lines(tmp_path / "a.jsonl", [mooncake(0, 10, [1])])
    with pytest.raises(ConfigError, match="give one file"):
        open_trace(tmp_path)
