"""The same job on several nodes: what they report is merged exactly, and a real Ray cluster of two runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rewarm.bench.hosts_node import merge
from rewarm.bench.recompute import percentiles
from rewarm.bench.result import Cell, CellBytes, Request, Result


def cell(times: list[float | None], seconds: float, **changes: Any) -> Cell:
    requests = [Request(session=n, ttft_s=t, hits=4, misses=int(t is None)) for n, t in enumerate(times)]
    made = Cell(
        target="a", emulated=False, concurrency=len(times), repeat=0, ttft_s=percentiles([1.0]), modelled_s=0.0,
        seconds=seconds, restored_tokens_per_s=100.0, read_bytes_per_s=1000 / seconds, ceiling_share=None,
        cpu_s_per_gb=1.0, client_cpu_share=0.1, hits=4, misses=0, miss_causes={}, wrong_blocks=0, compared="every byte",
        cold="proven", cold_reason="counted", bytes=CellBytes(payload=1000, padding=1, log=2, kernel=1003, device=2000),
        device="uring", recompute=None, requests=requests,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def test_percentiles_of_several_hosts_are_those_of_all_requests() -> None:
    slow, fast = [1.0, 2.0, 3.0, 10.0], [0.1, 0.2, 0.3, 0.4]
    merged = merge([cell([*slow], 10.0), cell([*fast], 0.4)])
    assert merged.ttft_s == percentiles([*slow, *fast])
    assert (merged.concurrency, merged.hits, len(merged.requests)) == (8, 8, 8)
    assert (merged.seconds, merged.read_bytes_per_s) == (10.0, 200.0)
    assert merged.restored_tokens_per_s == pytest.approx((100 * 10 + 100 * 0.4) / 10)
    assert merged.bytes == CellBytes(payload=2000, padding=2, log=4, kernel=2006, device=4000)


def test_the_worst_host_decides_whether_a_cell_is_cold_or_failed() -> None:
    warm = cell([1.0], 1.0, cold="failed", cold_reason="from memory")
    lost = cell([None], 1.0, misses=1, miss_causes={"missing": 1})
    blind = CellBytes(payload=1, padding=0, log=0, kernel=None, device=None)
    merged = merge([cell([1.0], 1.0), warm, lost, cell([1.0], 1.0, bytes=blind, cold="not_provable")])
    assert (merged.cold, merged.cold_reason) == ("failed", "from memory")
    assert (merged.misses, merged.miss_causes, merged.ttft_s.p99) == (1, {"missing": 1}, None)
    assert merged.bytes is not None
    assert merged.bytes.kernel is None


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes on this machine."""
    ray = pytest.importorskip("ray", reason="pip install 'rewarm[ray]'")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    made.add_node(**small)
    yield made.address
    made.shutdown()
    ray.shutdown()


def rewarm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rewarm", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=80)


@pytest.mark.scale
@pytest.mark.parametrize("cross", [False, True])
def test_two_nodes_restore_at_once(cluster: str, counted: Path, tmp_path: Path, cross: bool) -> None:
    pools, out = counted / "pools", tmp_path / "result.json"
    pools.mkdir()
    done = rewarm(
        "--ray", cluster, "--target", f"shared={pools}", "--tokens", "128", "--block-tokens", "16", "-o", str(out),
        "--concurrency", "2,4", "--repeats", "2", *(["--cross"] if cross else []),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = msgspec.json.decode(out.read_bytes(), type=Result)
    assert [(c.concurrency, c.repeat) for c in result.cells] == [(4, 0), (8, 0), (4, 1), (8, 1)]
    for found in result.cells:
        assert (found.cold, found.misses, found.wrong_blocks) == ("proven", 0, 0)
        assert found.hits == found.concurrency * 8
        assert found.bytes is not None
        assert found.bytes.payload == found.concurrency * json.loads(out.read_text())["sizes"]["bytes_per_session"]
        assert all(request.host for request in found.requests)
    assert any(("the next node" if cross else "itself") in note for note in result.notes)
    assert list(pools.iterdir()) == []
    assert "ended 2 processes on 2 nodes" in done.stderr


@pytest.mark.scale
def test_what_several_nodes_cannot_do_is_said(cluster: str, tmp_path: Path) -> None:
    for arguments, message in (
        (["--ray", cluster, "--target", "a=memory:"], "not on a mount that several hosts share"),
        (["--ray", cluster, "--server", "a=http://127.0.0.1:9/v1"], "several hosts restore waves from targets"),
        (["--ray", "127.0.0.1:9", "--target", f"a={tmp_path}"], "no Ray cluster at 127.0.0.1:9"),
        (["--cross", "--target", f"a={tmp_path}"], "--cross needs --ray"),
    ):
        done = rewarm(*arguments)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr[-2000:]
