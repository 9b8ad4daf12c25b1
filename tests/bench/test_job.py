"""Jobs and sessions: strict reading, numbers that cannot be run, and the blocks that follow from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewarm.errors import ConfigError
from rewarm.geometry.presets import load_model
from rewarm.geometry.sizes import bytes_total
from rewarm.workload.job import make_job, read_job
from rewarm.workload.sessions import KEY_BYTES, Sessions, block_lengths

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "jobs"
JOB = {"model": "Llama-3.1-8B", "tokens": 2048, "targets": {"local": "file:///mnt/a"}}


def test_what_is_left_out_has_its_default() -> None:
    job = make_job(JOB, "here")
    assert (job.block_tokens, job.concurrency, job.repeats, job.tp, job.seed) == (256, (8, 16, 32), 3, 1, 0)
    assert job.session_count == 32
    assert job.targets["local"].emulated_bytes_per_s is None


def test_a_file_says_the_same_as_flags_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "Qwen3-32B"\ntokens = 4096\nconcurrency = [2, 4]\n'
        '[targets]\nlocal = "file:///mnt/a"\n[targets.array]\nurl = "file:///mnt/b"\nrate = "1.5GB/s"\n'
    )
    job = read_job(path, {"tokens": 512, "seed": 9})
    assert (job.model, job.tokens, job.seed, job.concurrency) == ("Qwen3-32B", 512, 9, (2, 4))
    assert job.targets["array"].emulated_bytes_per_s == 1.5e9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokns": 1}, "here: unknown key 'tokns'; did you mean 'tokens'?"),
        ({"zzz": 1}, "unknown key 'zzz'; one of model, tokens"),
        ({"tokens": None}, "'tokens' is missing"),
        ({"targets": {}}, "'targets' is missing"),
        ({"targets": ["a"]}, "'targets' is a table"),
        ({"targets": {"a": {"ulr": "x"}}}, "target 'a': unknown key 'ulr'; did you mean 'url'?"),
        ({"targets": {"a": {"rate": "1GB/s"}}}, "target 'a': 'url' is missing"),
        ({"targets": {"a": {"url": "x", "rate": "0GB/s"}}}, "must be above 0"),
        ({"targets": {"a": {"url": "x", "rate": "fast"}}}, "cannot read 'fast' as a rate"),
        ({"targets": {"a b": "x"}}, "a target's name is letters"),
        ({"targets": {str(n): "x" for n in range(17)}}, "1 to 16 targets"),
        ({"tokens": "many"}, r"Expected `int`, got `str` - at `\$.tokens`"),
        ({"tokens": -1}, "'tokens' must be from 1"),
        ({"block_tokens": 4096}, "'block_tokens' must be from 1 to 2048, got 4096"),
        ({"concurrency": []}, "list of different numbers"),
        ({"concurrency": [8, 8]}, "list of different numbers"),
        ({"concurrency": [0]}, "'concurrency' must be from 1"),
        ({"sessions": 4}, "4 sessions cannot fill a wave of 32"),
        ({"gpus": 0}, "'gpus' must be from 1"),
        ({"repeats": 0}, "'repeats' must be from 1"),
        ({"seed": -1}, "'seed' must be from 0"),
        ({"servers": {"s": "http://a/v1"}}, "measures targets or servers, each by a job of its own"),
        ({"shape": "wafe"}, "Invalid enum value 'wafe'"),
        ({"shape": "open"}, "shape 'open' and 'requests_per_s' go together"),
        ({"requests_per_s": 3.0}, "shape 'open' and 'requests_per_s' go together"),
        ({"shape": "trace"}, "shape 'trace' and 'trace' go together"),
        ({"think_s": 1.0}, "'think_s' belongs to the shape 'closed'"),
        ({"think_s": "1 parsec"}, "parsec"),
        ({"shape": "closed", "rounds": 0}, "'rounds' must be from 1"),
        ({"shape": "closed", "sessions": 40}, "cannot fill a closed of 32, which needs 128"),
        ({"objective": "ttft_p95 <= 2 s"}, "unknown figure 'ttft_p95'; did you mean"),
        ({"fresh_requests_per_s": 1.0}, "belong to servers"),
        ({"write_bytes_per_s": "fast"}, "cannot read 'fast' as a rate"),
        ({"output_tokens": 0}, "'output_tokens' must be from 1"),
    ],
)
def test_a_slip_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make_job({**JOB, **change}, "here")


SERVERS = {"tokens": 2048, "servers": {"vllm": {"url": "http://a:8000/v1"}}}


def test_a_job_of_servers_needs_no_model() -> None:
    job = make_job({**SERVERS, "think_s": "2s", "shape": "closed", "timeout_s": "5min"}, "here")
    assert (job.model, job.think_s, job.timeout_s, job.session_count) == ("", 2.0, 300.0, 128)
    assert (job.servers["vllm"].api, job.servers["vllm"].cold, job.populate, job.recompute) == (
        "chat",
        None,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "localhost:8000"}, "begins with http:// or https://"),
        ({"urll": "http://a"}, "server 'vllm': unknown key 'urll'; did you mean 'url'?"),
        ({"cold": "restart"}, "cold by restart needs 'restart'"),
        ({"cold": "warm"}, "Invalid enum value 'warm'"),
        ({"api": "chatt"}, "Invalid enum value 'chatt'"),
        ({"cache_tokens": 0}, "'cache_tokens' must be from 1"),
        ({"connections": 0}, "'connections' must be from 1"),
    ],
)
def test_a_slip_in_a_server_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        make_job({**SERVERS, "servers": {"vllm": {"url": "http://a", **change}}}, "here")
    with pytest.raises(ConfigError, match="'write_bytes_per_s' belongs to targets"):
        make_job({**SERVERS, "write_bytes_per_s": 1e9}, "here")


def test_a_file_that_is_no_job_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the job .*missing.toml: No such file"):
        read_job(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("tokens = = 1")
    with pytest.raises(ConfigError, match=r"bad.toml is not TOML"):
        read_job(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_jobs(path: Path) -> None:
    job = read_job(path)
    assert job.targets or job.servers
    assert 10 <= len(path.read_text().splitlines()) <= 20


def test_there_are_examples() -> None:
    assert list(EXAMPLES.glob("*.toml"))


def test_the_published_wave_has_its_published_size() -> None:
    """Qwen3-Coder-480B-A35B in bf16 on 8 ranks: 30,208 tokens x 253,952 bytes = 7,671,382,016, in 118 x 8 blocks."""
    lengths = block_lengths(load_model("Qwen3-Coder-480B-A35B"), 30208, 256, 8, None)
    assert len(lengths) == 30208 // 256 * 8
    assert set(lengths) == {256 * 253952 // 8}
    assert sum(lengths) == 7_671_382_016


@pytest.mark.parametrize(("model", "tp"), [("DeepSeek-V3", 8), ("Llama-3.1-8B", 16)])
def test_what_ranks_hold_alike_is_stored_once(model: str, tp: int) -> None:
    lengths = block_lengths(load_model(model), 1024, 256, tp, None)
    assert sum(lengths) == bytes_total(load_model(model), 1024)


def test_window_layers_keep_the_blocks_that_their_window_reaches() -> None:
    """Gemma-3-27B at 4,096 tokens, blocks of 256: 10 full layers whole, 52 window layers the last 1,024 tokens."""
    model = load_model("Gemma-3-27B")
    lengths = block_lengths(model, 4096, 256, 1, None)
    assert len(lengths) == 16
    assert lengths[:12] == [256 * 81920] * 12
    assert lengths[12:] == [256 * (81920 + 52 * 2 * 16 * 128 * 2)] * 4
    assert sum(lengths) == bytes_total(model, 4096)


def test_linear_layers_add_one_state_to_the_last_block() -> None:
    model = load_model("Qwen3-Next-80B-A3B")
    lengths = block_lengths(model, 1024, 256, 1, None)
    assert lengths[0] == lengths[1] == lengths[2] < lengths[3]
    assert sum(lengths) == bytes_total(model, 1024)


def test_less_than_a_block_stores_nothing() -> None:
    with pytest.raises(ConfigError, match="100 tokens are less than one block of 256"):
        block_lengths(load_model("Llama-3.1-8B"), 100, 256, 1, None)


def test_keys_and_numbers_are_all_different_and_follow_from_the_seed() -> None:
    sessions = Sessions(seed=1, count=3, lengths=(10, 20))
    keys = [key for session in range(3) for key in sessions.keys(session)]
    assert len(set(keys)) == 6
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert [*sessions.numbers(0), *sessions.numbers(1), *sessions.numbers(2)] == list(range(6))
    assert sessions.keys(2) == Sessions(seed=1, count=3, lengths=(10, 20)).keys(2)
    assert not set(keys) & set(Sessions(seed=2, count=3, lengths=(10, 20)).keys(0))
    assert (sessions.bytes_per_session, sessions.bytes_total) == (30, 90)
    with pytest.raises(IndexError):
        sessions.numbers(3)
