"""Whole runs on real files: the shape of the result, the order of its cells, and runs that must not be believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rewarm.bench import pools, readers, replay
from rewarm.bench.cold import FAILED, NOT_PROVABLE, PROVEN
from rewarm.bench.payload import Payload
from rewarm.bench.pools import Pool, needed_bytes
from rewarm.bench.replay import run_job
from rewarm.bench.result import Result
from rewarm.errors import ConfigError, StorageError
from rewarm.store.devices import select
from rewarm.workload.job import Job, make_job

TOKENS, BLOCK_TOKENS = 48, 16
SESSION_BYTES = TOKENS * 131072  # Llama-3.1-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes per token


def job(targets: dict[str, Any], **changes: Any) -> Job:
    values = {
        "model": "Llama-3.1-8B",
        "tokens": TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "concurrency": [1, 2],
        "repeats": 2,
        "seed": 3,
        "targets": targets,
        **changes,
    }
    return make_job(values, "test")


def run(stage: Any, targets: dict[str, Any], **changes: Any) -> Result:
    return run_job(job(targets, **changes), stage, lambda text: None)


def test_a_cold_run_is_proven_and_leaves_nothing(counted: Path, stage: Any) -> None:
    told: list[str] = []
    result = run_job(job({"disk": f"file://{counted}"}), stage, told.append)
    assert [(cell.concurrency, cell.repeat) for cell in result.cells] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    for cell in result.cells:
        size = cell.concurrency * SESSION_BYTES
        assert (cell.cold, cell.misses, cell.wrong_blocks) == (PROVEN, 0, 0)
        assert cell.compared == "every byte"
        assert cell.hits == cell.concurrency * TOKENS // BLOCK_TOKENS
        assert cell.bytes.payload == size
        assert cell.bytes.kernel is not None
        assert abs(cell.bytes.kernel - (size + cell.bytes.padding + cell.bytes.log)) <= 0.01 * size
        assert cell.read_bytes_per_s == pytest.approx(size / cell.seconds)
        assert cell.restored_tokens_per_s == pytest.approx(cell.concurrency * TOKENS / cell.seconds)
        times = [request.ttft_s for request in cell.requests]
        assert cell.ttft_s.p99 == max(times) == cell.seconds  # type: ignore[type-var]
        assert cell.ttft_s.p50 == sorted(times)[0]  # type: ignore[type-var]  # nearest rank of one or two
    top = max(ceiling.read_bytes_per_s for ceiling in result.ceiling)
    assert [cell.ceiling_share for cell in result.cells] == [cell.read_bytes_per_s / top for cell in result.cells]
    assert result.failures == []
    assert list(counted.iterdir()) == []
    assert len(told) == 1
    assert told[0].startswith(f"removed {counted}")


def test_the_result_has_the_documented_shape(counted: Path, stage: Any) -> None:
    text = msgspec.json.encode(run(stage, {"disk": f"file://{counted}"}, repeats=1))
    result = json.loads(text)
    assert {"schema", "version", "host", "seed", "job", "ceiling", "cells"} <= set(result)
    assert (result["schema"], result["seed"], result["job"]["tokens"]) == (1, 3, TOKENS)
    cell = result["cells"][0]
    named = (
        "target emulated concurrency repeat ttft_s restored_tokens_per_s read_bytes_per_s ceiling_share cpu_s_per_gb "
        "hits misses cold bytes recompute"
    )
    assert set(named.split()) <= set(cell)
    assert set(cell["ttft_s"]) == {"p50", "p90", "p99"}
    assert {"payload", "padding", "log", "kernel"} <= set(cell["bytes"])
    assert cell["recompute"]["source"] == "modelled"
    assert msgspec.json.decode(text, type=Result).cells[0].target == "disk"
    documented = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "bench.md").read_text()
    names = {*result, *cell, *result["ceiling"][0], *result["summary"][0], *cell["requests"][0], *cell["recompute"]}
    assert [name for name in sorted(names) if f"`{name}`" not in documented] == []


def test_targets_are_interleaved_and_share_the_pool_of_their_url(counted: Path, stage: Any) -> None:
    slow = {"url": f"file://{counted}", "rate": "300MB/s"}
    result = run(stage, {"disk": f"file://{counted}", "slow": slow})
    order = [(cell.repeat, cell.concurrency, cell.target) for cell in result.cells]
    assert order == [(r, c, name) for r in (0, 1) for c in (1, 2) for name in ("disk", "slow")]
    assert [label for label, _ in stage.labels].count("filling disk") == 1
    assert not any("filling slow" in label for label, _ in stage.labels)
    assert all("emulated" in label for label, _ in stage.labels if "slow" in label)


def test_an_emulated_medium_is_labelled_and_never_faster_than_its_rate(counted: Path, stage: Any) -> None:
    rate = 200e6
    result = run(stage, {"slow": {"url": f"file://{counted}", "rate": "200MB/s"}})
    assert all(cell.emulated and cell.cold == PROVEN for cell in result.cells)
    assert all(cell.read_bytes_per_s <= rate for cell in result.cells)
    assert all(ceiling.emulated and ceiling.read_bytes_per_s <= rate for ceiling in result.ceiling)
    assert not any("against recompute" in line for line in result.verdicts)


def test_memory_is_a_target_that_proves_nothing(stage: Any) -> None:
    result = run(stage, {"ram": "memory:"})
    assert {cell.cold for cell in result.cells} == {NOT_PROVABLE}
    assert {cell.ceiling_share for cell in result.cells} == {None}
    assert result.failures == []
    with pytest.raises(ConfigError, match="no medium to emulate"):
        run(stage, {"ram": {"url": "memory:", "rate": "1GB/s"}})


def test_planted_warm_data_makes_the_run_fail(counted: Path, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffered reads of files whose pages are still cached: what a benchmark that forgets to drop them measures."""
    choose = select.choose_device
    buffered = {"direct": False, "name": "threads"}
    monkeypatch.setattr(
        "rewarm.store.opening.choose_device",
        lambda *args, **kwargs: type(choose(*args, **kwargs))(**{**vars(choose(*args, **kwargs)), **buffered}),
    )
    dropped = run(stage, {"disk": f"file://{counted}"}, repeats=1)
    assert {cell.cold for cell in dropped.cells} == {PROVEN}
    monkeypatch.setattr(Pool, "make_cold", lambda self: None)
    monkeypatch.setattr(replay, "measure_ceiling", lambda *args, **kwargs: [])  # it drops the cache as well
    warm = run(stage, {"disk": f"file://{counted}"}, repeats=1)
    assert {cell.cold for cell in warm.cells} == {FAILED}
    assert all("not cold" in line and "from memory" in line for line in warm.failures)
    assert len(warm.failures) == 2


def test_bytes_that_were_not_stored_so_fail_the_run(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payload, "matches", lambda self, number, data: number != 1)
    result = run(stage, {"ram": "memory:"}, repeats=1)
    assert result.failures == [
        f"ram, concurrency {n}, repeat 0: 1 blocks came back with other bytes than were stored" for n in (1, 2)
    ]
    assert result.cells[0].ttft_s.p50 is None
    assert [request.ttft_s is None for request in result.cells[1].requests] == [True, False]


def test_a_miss_fails_the_run_and_has_no_time(stage: Any) -> None:
    class Forgetful(readers.Wave):
        def run(self, *arguments: Any) -> Any:
            self._store.evict(2 * SESSION_BYTES - 1)
            return super().run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "Wave", Forgetful)
        result = run(stage, {"ram": "memory:"}, concurrency=[2], repeats=1)
    assert result.cells[0].misses == 1
    assert result.cells[0].miss_causes == {"missing": 1}
    assert result.cells[0].ttft_s.p99 is None
    assert result.summary[0].ttft_s.p99 is None
    assert result.failures == ["ram, concurrency 2, repeat 0: 1 of 6 blocks missed: 1 missing"]


def test_new_tokens_are_modelled_and_labelled(stage: Any) -> None:
    """2 x 8,030,261,248 FLOP per new token and attention over the prefix, on an H100 at half of 989e12 FLOP/s."""
    plain, longer = run(stage, {"ram": "memory:"}, new_tokens=0), run(stage, {"ram": "memory:"}, new_tokens=100)
    attention = 4 * 32 * 32 * 128 * (TOKENS * 100 + 100**2 / 2)
    expected = (2 * 8_030_261_248 * 100 + attention) / (989e12 * 0.5)
    assert {cell.modelled_s for cell in plain.cells} == {0.0}
    for cell in longer.cells:
        assert cell.modelled_s == pytest.approx(expected)
        assert cell.ttft_s.p99 == pytest.approx(cell.seconds + expected)


def test_a_wave_larger_than_memory_is_restored_in_slices_and_it_is_said(
    stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = BLOCK_TOKENS * 131072
    monkeypatch.setattr(replay, "available_memory", lambda: 2 * 2 * 2 * block_bytes)  # half of it: two blocks for two
    result = run(stage, {"ram": "memory:"}, repeats=1)
    assert [cell.compared for cell in result.cells] == ["every byte", "8 bytes of every 4096"]
    assert result.failures == []
    assert any(note.startswith("memory holds no whole wave of 2:") for note in result.notes)


def test_a_run_stops_repeating_when_its_time_is_over(stage: Any) -> None:
    result = run_job(job({"ram": "memory:"}, repeats=50), stage, lambda text: None, seconds_max=0.0)
    assert {cell.repeat for cell in result.cells} == {0}
    assert any("1 of 50 repeats" in note for note in result.notes)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("file://{}/missing", ConfigError, "no such directory"),
        ("file://{}?capacity=8MiB", ConfigError, r"stores 12.0 MiB and a capacity of 8.0 MiB would evict"),
        ("file://{}?capcity=8MiB", ConfigError, "did you mean 'capacity'"),
        ("ftp://{}", ConfigError, "unknown scheme 'ftp'"),
    ],
)
def test_targets_that_cannot_be_measured_are_named(
    tmp_path: Path, stage: Any, url: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(stage, {"disk": url.format(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_a_job_larger_than_the_disk_is_refused_before_the_first_byte(
    tmp_path: Path, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pools.medium_of
    monkeypatch.setattr(pools, "medium_of", lambda path: msgspec.structs.replace(real(path), free_bytes=20 << 20))
    with pytest.raises(StorageError, match=r"'disk': the job needs 79.0 MiB and .* to give"):
        run(stage, {"disk": f"file://{tmp_path}"})
    assert stage.labels == []
    assert list(tmp_path.iterdir()) == []


def test_a_pool_is_made_large_enough() -> None:
    assert needed_bytes(1000 << 20) * 0.9 > 1000 << 20


@pytest.mark.scale
def test_the_order_decides_the_median_of_a_wave_and_not_its_end(counted: Path, stage: Any) -> None:
    """All at once: every request ends with the last. One after another, either way: the median is half of the last."""
    url = f"file://{counted}"
    orders = ("together", "arrival", "shortest")
    targets = {name: {"url": url, "rate": "100MB/s", "order": name} for name in orders}
    result = run(stage, targets, tokens=64, concurrency=[8], repeats=1)
    assert [cell.target for cell in result.cells] == list(orders)
    for cell in result.cells:
        assert (cell.misses, cell.wrong_blocks, cell.compared) == (0, 0, "every byte")
        assert cell.ttft_s.p50 is not None
        assert cell.ttft_s.p99 is not None
        median = cell.ttft_s.p50 / cell.ttft_s.p99
        assert median > 0.8 if cell.target == "together" else median < 0.65


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ConfigError, match=r"order"):
        job({"disk": {"url": "file:///tmp", "order": "longest"}})


def test_decode_is_modelled_from_memory_traffic_and_labelled(stage: Any) -> None:
    """(2 x 8,030,261,248 bytes of weights + 2 requests x 148 tokens x 131,072) over 0.6 of an H100's 3.35e12 B/s."""
    (cell,) = run(stage, {"ram": "memory:"}, new_tokens=100, output_tokens=11, concurrency=[2], repeats=1).cells
    assert cell.decode is not None
    tpot_s = (2 * 8_030_261_248 + 2 * 148 * 131072) / (0.6 * 3.35e12)
    assert cell.decode.tpot_s == pytest.approx(tpot_s)
    assert cell.ttft_s.p99 is not None
    assert cell.decode.e2e_s.p99 == pytest.approx(cell.ttft_s.p99 + 10 * tpot_s)
    assert (cell.decode.source, cell.decode.output_tokens) == ("modelled", 11)
    for request in cell.requests:
        assert request.ttft_s is not None
        assert request.modelled_end_s == pytest.approx(request.ttft_s + 10 * tpot_s)
