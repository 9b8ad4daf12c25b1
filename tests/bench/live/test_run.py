"""Live runs against the scripted server over real HTTP: what is stored, forgotten, restored and counted.

No test here looks at how long something took; `test_timing.py` does, on a quiet machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.bench.live.scripted import FIRST_WORDS, Scripted

from rewarm.bench.live.prompts import text
from rewarm.bench.result import Result
from rewarm.errors import ConfigError, StorageError

Run = Callable[..., Result]


def restored(server: Scripted) -> list[dict[str, Any]]:
    """Requests of cells: those that asked for a whole answer."""
    return [entry for entry in server.record() if entry["wanted"] == 5]


def test_a_restart_is_answered_from_the_tier_and_recompute_is_not(server: Scripted, live: Run) -> None:
    server.tell(tier=True)
    servers = {"tiered": {"url": server.url, "restart": server.forget_command()}}
    result = live(servers, repeats=2, recompute=True)
    assert result.failures == []
    assert [(cell.target, cell.concurrency, cell.repeat) for cell in result.cells] == [
        ("tiered", 2, 0),
        ("tiered", 2, 1),
    ]
    for cell in result.cells:
        assert cell.live is not None
        assert (cell.live.prompt_tokens, cell.live.cached_tokens) == (120, 120)
        assert (cell.cold, cell.bytes, cell.read_bytes_per_s) == ("not_provable", None, None)
        assert "restarted" in cell.cold_reason
        assert cell.recompute is not None
        assert cell.recompute.source == "measured"
        assert all(request.live and request.live.output_tokens == 5 for request in cell.requests)
        assert sum(count for _, count in cell.live.gaps) <= 8
    seen = restored(server)
    assert [entry["cached"] for entry in seen] == [60, 60, 0, 0] * 2
    assert len({entry["start"] for entry in seen}) == 2 + 4  # sessions come again, fresh prompts never do
    summary = result.summary[0].live
    assert summary is not None
    assert summary.cached_share == 1.0
    assert any("measured on the same server" in line for line in result.verdicts)


def test_the_parts_of_a_request_follow_each_other(server: Scripted, live: Run) -> None:
    server.tell(ttft_s=0.05)
    result = live({"a": {"url": server.url, "cold": "none"}})
    for request in result.cells[0].requests:
        assert request.live is not None
        assert request.submitted_s is not None
        assert request.ttft_s is not None
        assert request.live.end_s is not None
        assert 0 <= request.submitted_s < request.ttft_s < request.live.end_s
        assert request.ttft_s >= 0.05
    encoded = msgspec.json.encode(result)
    assert msgspec.json.encode(msgspec.json.decode(encoded, type=Result)) == encoded


def test_more_prompts_than_the_cache_holds_push_the_sessions_out(server: Scripted, live: Run) -> None:
    server.tell(cache_tokens=320)
    result = live({"a": server.url})
    assert [cell.live.cached_tokens for cell in result.cells if cell.live] == [0]
    assert "400 tokens of other prompts" in result.cells[0].cold_reason
    pushed = [entry for entry in server.record() if entry["wanted"] == 1]
    assert len(pushed) == 2 + 7  # two sessions, and 1.25 x 320 tokens in prompts of 60


def test_without_forcing_a_server_is_warm_and_said_to_be(server: Scripted, live: Run) -> None:
    result = live({"a": {"url": server.url, "cold": "none"}})
    assert result.cells[0].live is not None
    assert result.cells[0].live.cached_tokens == 120
    assert "nothing was done" in result.cells[0].cold_reason


def test_a_cache_of_unknown_size_is_not_taken_for_cold(server: Scripted, live: Run) -> None:
    with pytest.raises(ConfigError, match="do not say how large its cache is; give 'restart'"):
        live({"a": server.url})


def test_servers_are_interleaved(server: Scripted, live: Run) -> None:
    one = {"url": server.url, "cold": "none"}
    result = live({"a": one, "b": one}, repeats=2, concurrency=[1, 2])
    order = [(cell.repeat, cell.concurrency, cell.target) for cell in result.cells]
    assert order == [(r, c, name) for r in (0, 1) for c in (1, 2) for name in "ab"]
    assert {row.target for row in result.differences} == {"b"}


@pytest.mark.parametrize(
    ("shape", "requests"),
    [
        ({"shape": "closed", "rounds": 3, "think_s": 0.01}, 6),
        ({"shape": "open", "requests_per_s": 50.0}, 2),
    ],
)
def test_shapes(server: Scripted, live: Run, shape: dict[str, Any], requests: int) -> None:
    result = live({"a": {"url": server.url, "cold": "none"}}, **shape)
    assert [request.session for request in result.cells[0].requests] == list(range(requests))
    starts = [request.intended_s for request in result.cells[0].requests]
    assert sorted(starts)[-1] > 0


def test_new_tokens_follow_the_stored_prefix(server: Scripted, live: Run) -> None:
    result = live({"a": {"url": server.url, "cold": "none", "api": "completions"}}, new_tokens=10)
    assert [(entry["tokens"], entry["cached"]) for entry in restored(server)] == [(70, 60)] * 2
    assert result.failures == []


def test_a_body_of_the_job_is_added(server: Scripted, live: Run) -> None:
    live({"a": {"url": server.url, "cold": "none", "body": {"ignore_eos": True}}})
    assert all(entry["body"]["ignore_eos"] for entry in server.record())


def test_disturbing_prompts_do_not_count(server: Scripted, live: Run) -> None:
    server.tell(ttft_s=0.2)
    result = live({"a": {"url": server.url, "cold": "none"}}, fresh_requests_per_s=100.0)
    assert len(result.cells[0].requests) == 2
    assert len([entry for entry in server.record() if entry["wanted"] == 1]) > 2


def test_a_server_that_reports_no_tokens_is_measured_all_the_same(server: Scripted, live: Run) -> None:
    server.tell(no_usage=True)
    result = live({"a": {"url": server.url, "cold": "none"}})
    cell = result.cells[0]
    assert cell.live is not None
    assert (cell.live.cached_tokens, cell.restored_tokens_per_s) == (None, None)
    assert [request.live.output_tokens for request in cell.requests if request.live] == [5, 5]
    assert any("reports no tokens" in note for note in result.notes)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("500", "HTTP 500"),
        ("malformed", "malformed event"),
        ("garbage", "malformed event"),
        ("error", "error in the stream"),
        ("close", "closed early"),
        ("hang", "timed out"),
        ("silent", "timed out"),
    ],
)
def test_a_fault_is_a_counted_failure(server: Scripted, live: Run, fault: str, cause: str) -> None:
    server.tell(fault=fault, fault_every=2)
    result = live({"a": {"url": server.url, "cold": "none"}}, timeout_s=0.5, concurrency=[4])
    cell = result.cells[0]
    assert (cell.hits, cell.misses, cell.miss_causes) == (2, 2, {cause: 2})
    failed = [request for request in cell.requests if request.live and request.live.failure]
    assert [request.ttft_s for request in failed] == [None, None]
    assert all(request.live.failure.startswith(cause) for request in failed if request.live and request.live.failure)
    assert (cell.ttft_s.p90, cell.ttft_s.p50 is None) == (None, False)
    assert result.failures == [f"a, concurrency 4, repeat 0: 2 of 4 requests failed: 2 {cause}"]
    assert any("no figure, requests failed" in line for line in result.verdicts) or not result.verdicts


def test_a_server_that_dies_is_counted_and_ends_the_run(live: Run) -> None:
    with Scripted(fault="die") as server:
        result = live({"a": {"url": server.url, "cold": "none"}}, concurrency=[4])
        assert result.cells[0].hits == 0
        assert set(result.cells[0].miss_causes) <= {"connection lost", "cannot connect", "closed early"}
        with pytest.raises(StorageError, match="server 'a' does not answer at http://"):
            live({"a": {"url": server.url, "cold": "none"}})


def test_a_server_that_cannot_be_filled_ends_the_run(server: Scripted, live: Run) -> None:
    server.tell(lists_models=False)
    with pytest.raises(ConfigError, match=r"lists no models at .*/v1/models .HTTP 404.; name the one it serves"):
        live({"a": {"url": server.url, "cold": "none"}})
    with pytest.raises(
        StorageError, match="does not answer a short prompt: HTTP 404: The model `other` does not exist"
    ):
        live({"a": {"url": server.url, "cold": "none", "model": "other"}})


def test_a_model_that_is_not_served_is_named(server: Scripted, live: Run) -> None:
    with pytest.raises(ConfigError, match="does not serve the model 'scriptd'; did you mean 'scripted'"):
        live({"a": {"url": server.url, "cold": "none", "model": "scriptd"}})


def test_a_restart_command_that_fails_says_what_it_said(server: Scripted, live: Run) -> None:
    with pytest.raises(StorageError, match="the restart command ended with 3: no such unit"):
        live({"a": {"url": server.url, "restart": "echo no such unit; exit 3"}})


def test_prompts_are_distinct_from_the_start_and_longer_ones_begin_with_shorter(server: Scripted) -> None:
    assert text(1, 7, 400).startswith(text(1, 7, 100))
    starts = {text(seed, number, 100)[:40] for seed in range(3) for number in range(100)}
    assert len(starts) == 300
    assert len(text(0, 0, FIRST_WORDS).split()) == FIRST_WORDS
    assert json.loads(json.dumps(text(0, 1 << 92, 4)))
