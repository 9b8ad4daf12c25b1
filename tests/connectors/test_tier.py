"""The tier and the connector over a vLLM that is not one: what they answer, refuse, count."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.connectors import fake_vllm
from tests.connectors.conftest import Install, offloading_config, vllm_config, write_weights

from rewarm.errors import ConfigError, StorageError
from rewarm.workload import open_trace

ROW, COUNT = 8192, 8
KEYS = [bytes([number]) * 36 for number in range(1, COUNT + 1)]


def make_tier(package: Any, pool: Path, **options: Any) -> Any:
    """A tier over a pool, with a name for its namespace."""
    memory = np.frombuffer(mmap.mmap(-1, ROW * COUNT), np.uint8).reshape(COUNT, ROW)
    options = {"url": f"file://{pool}?capacity=64MiB", "namespace": "n", **options}
    spec = SimpleNamespace(config=options.pop("config", offloading_config()), replicated_layout=False)
    tier = package.RewarmTier(
        offloading_spec=spec,
        primary_kv_view=memoryview(memory),
        tier_type="RewarmTier",
        backpressure_detector=None,
        **options,
    )
    tier.memory = memory
    return tier


def job(number: int, keys: list[bytes], rows: list[int]) -> fake_vllm.TransferJob:
    """A job of the engine."""
    return fake_vllm.TransferJob(number, keys, np.array(rows, np.int32))


def end(tier: Any) -> Any:
    """Wait for one job."""
    limit_s = time.monotonic() + 20
    while not (over := tier.get_finished_jobs()):
        tier.on_schedule_end(None)
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    assert len(over) == 1
    return over[0]


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1", "0.32.0+cpu", "0.33.0"])
def test_store_and_load_on_every_version(install: Install, tmp_path: Path, version: str) -> None:
    tier = make_tier(install(version), tmp_path)
    tier.memory[0] = 7
    tier.submit_store(job(1, KEYS[:1], [0]))
    assert end(tier).success
    tier.memory[0] = 0
    assert tier.lookup(KEYS[0], None) is fake_vllm.LookupResult.HIT
    assert tier.lookup(KEYS[1], None) is fake_vllm.LookupResult.MISS
    tier.submit_load(job(2, KEYS[:2], [3, 4]))
    tier.on_schedule_end(None)
    assert tier.has_pending_work()
    result = end(tier)
    assert (result.success, result.successful_keys) == (False, KEYS[:1])
    assert (tier.memory[3] == 7).all()
    assert hasattr(result, "transfer_bytes") == (version != "0.30.0")
    tier.shutdown()


@pytest.mark.parametrize("version", ["0.29.3", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_list(install: Install, version: str) -> None:
    package = install(version)
    with pytest.raises(ConfigError, match=r"0\.30, 0\.31, 0\.32, 0\.33"):
        _ = package.RewarmTier


def test_an_interface_that_lacks_something_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install()
    monkeypatch.delattr(sys.modules["vllm.v1.kv_offload.tiering.base"], "TransferJob")
    with pytest.raises(ConfigError, match="TransferJob"):
        _ = package.RewarmTier


def test_importing_the_package_imports_no_engine() -> None:
    code = "import sys, rewarm.connectors.vllm as v; assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_an_engine_the_error_says_where_to_install(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="environment"):
        _ = package.RewarmTier
    with pytest.raises(AttributeError, match="RewarmTeer"):
        _ = package.RewarmTeer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"promotion_buget": 1}, "did you mean 'promotion_budget'"),
        ({"url": ""}, '"url"'),
        ({"namespace": None}, "RewarmConnector"),
        ({"deadline": 0}, "above 0"),
        ({"url": "file:///nowhere/at/all?capacity=1GiB"}, "does not exist"),
    ],
)
def test_a_bad_configuration_stops_the_start(
    install: Install, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    package = install()
    with pytest.raises(ConfigError, match=words):
        make_tier(package, tmp_path, **options)


def test_the_start_tries_one_block_and_logs_it(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package = install()
    with caplog.at_level(logging.INFO, "vllm.rewarm"):
        tier = make_tier(package, tmp_path)
    assert [record for record in caplog.records if "one block of 8.0 KiB stored in" in record.getMessage()]
    tier.shutdown()


def test_lookups_over_the_budget_wait(install: Install, tmp_path: Path) -> None:
    tier = make_tier(install(), tmp_path, promotion_budget=2 * ROW)
    tier.submit_store(job(1, KEYS[:4], [0, 1, 2, 3]))
    end(tier)
    result = fake_vllm.LookupResult
    assert [tier.lookup(key, None) for key in KEYS[:5]] == [
        result.HIT,
        result.HIT,
        result.RETRY,
        result.RETRY,
        result.MISS,
    ]
    tier.on_schedule_end(None)
    assert tier.lookup(KEYS[3], None) is result.HIT
    tier.shutdown()


def test_after_a_reset_nothing_is_served(install: Install, tmp_path: Path) -> None:
    tier = make_tier(install(), tmp_path)
    tier.submit_store(job(1, KEYS[:1], [0]))
    tier.drain_jobs()
    assert end(tier).success, "what was under way ended before the reset"
    assert tier.lookup(KEYS[0], None) is fake_vllm.LookupResult.MISS
    tier.submit_store(job(2, KEYS[1:3], [0, 1]))
    assert not end(tier).success
    tier.shutdown()


def test_metrics_are_what_changed(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = install()
    tier = make_tier(package, tmp_path)
    monkeypatch.setattr("rewarm.connectors.vllm.tier.REPORT_INTERVAL_S", 0.0)
    tier.submit_store(job(1, KEYS[:2], [0, 1]))
    end(tier)
    tier.submit_load(job(2, [KEYS[0], KEYS[5]], [0, 1]))
    end(tier)
    stats = tier.get_stats()
    assert stats.counters[("vllm:rewarm_restored_bytes",)] == ROW
    assert stats.counters[("vllm:rewarm_stored_bytes",)] == 2 * ROW
    assert stats.counters[("vllm:rewarm_failed_blocks", "load", "missing")] == 1
    assert not tier.get_stats().counters, "counted once"
    names = set(package.RewarmTier.build_metric_definitions({}))
    assert {key[0] for key in stats.counters} | set(stats.gauges) <= names
    tier.shutdown()


def test_equal_copies_of_all_ranks_are_stored_once(install: Install, tmp_path: Path) -> None:
    package = install()
    config = offloading_config(parallel__world_size=4, parallel__tp_size=4, worker_kv_bytes_per_block=ROW // 4)
    engine = {
        "config": {"a": 1},
        "commit": "0" * 40,
        "weights": None,
        "overrides": {},
        "hash_algorithm": "sha256",
        "copies": 4,
    }
    tier = make_tier(package, tmp_path, namespace=None, engine=engine, config=config)
    tier.memory[0] = 9
    tier.submit_store(job(1, KEYS[:1], [0]))
    end(tier)
    tier.submit_load(job(2, KEYS[:1], [5]))
    assert end(tier).success
    assert (tier.memory[5] == 9).all()
    assert tier._rows.block_bytes == ROW // 4
    tier.shutdown()


def test_the_end_reports_memory_that_the_kernel_still_holds(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(install(), tmp_path)
    monkeypatch.setattr(tier._traffic, "wait_released", lambda timeout_s: False)
    with pytest.raises(StorageError, match="not unmapped"):
        tier.shutdown()


def test_the_connector_tells_its_tiers_the_model(install: Install, tmp_path: Path) -> None:
    package = install()
    config = vllm_config(write_weights(tmp_path))
    connector = package.RewarmConnector(config, fake_vllm.Role.SCHEDULER, SimpleNamespace(kv_tp_replicas=2))
    (tier,) = connector.config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    assert tier["engine"]["copies"] == 2
    assert len(tier["engine"]["weights"]) == 64
    assert "engine" not in config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]
    worker = package.RewarmConnector(config, fake_vllm.Role.WORKER, None)
    assert worker.config is config, "workers have no tiers, and read no weights"


def test_a_tier_with_a_namespace_keeps_it(install: Install, tmp_path: Path) -> None:
    package = install()
    config = vllm_config(tmp_path / "no weights here", lora_config=object())
    config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]["namespace"] = "mine"
    connector = package.RewarmConnector(config, fake_vllm.Role.SCHEDULER, SimpleNamespace())
    assert connector.config is config


def test_a_seed_that_changes_with_the_process_is_refused(install: Install, tmp_path: Path) -> None:
    package = install(random_seed=True)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        package.RewarmConnector(vllm_config(write_weights(tmp_path)), fake_vllm.Role.SCHEDULER, SimpleNamespace())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, "recompute"),
        ({"kv_transfer_config__kv_connector_extra_config": {"secondary_tiers": [{"type": "fs"}]}}, "RewarmTier"),
    ],
)
def test_a_connector_without_what_it_needs_is_refused(
    install: Install, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    package = install()
    with pytest.raises(ConfigError, match=words):
        package.RewarmConnector(vllm_config(tmp_path, **changes), fake_vllm.Role.WORKER, None)


def test_a_request_waits_no_longer_than_the_deadline(install: Install, tmp_path: Path) -> None:
    package = install()
    config = vllm_config(write_weights(tmp_path))
    config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"][0]["deadline"] = "20ms"
    connector = package.RewarmConnector(config, fake_vllm.Role.WORKER, None)
    request = SimpleNamespace(request_id="r")
    limit_s = time.monotonic() + 20
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    while connector.get_num_new_matched_tokens(request, 0) == (None, False):
        assert time.monotonic() < limit_s
        time.sleep(0.001)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.request_finished(request, [])
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False), "a new wait"
    connector.matched = (64, True)
    assert connector.get_num_new_matched_tokens(request, 0) == (64, True)
    connector.request_finished_all_groups(request, ())


def test_a_recording_tier_writes_a_trace_that_is_read(install: Install, tmp_path: Path) -> None:
    """Each request once, with all its keys, and each save; the file has the hashes of this recording only."""
    trace = tmp_path / "trace.jsonl"
    pool = tmp_path / "pool"
    pool.mkdir()
    tier = make_tier(install("0.32.0"), pool, record=str(trace))
    request = SimpleNamespace(request_id="a", block_hashes=[key[:32] for key in KEYS[:3]], num_tokens=200)
    for _ in range(2):
        tier.choose(request, 0, lambda key: False)
    tier.submit_store(job(1, KEYS[:1], [0]))
    assert end(tier).success
    tier.shutdown()
    lines = trace.read_text().splitlines()
    assert [("lookup" in line, "save" in line) for line in lines[1:]] == [(True, False), (False, True)]
    (batch,) = open_trace(trace).batches()
    assert batch.input_tokens.tolist() == [200]
    assert not any(key.hex() in line for key in KEYS for line in lines)
    with pytest.raises(StorageError, match="cannot record to"):
        make_tier(install("0.32.0"), pool, record=str(tmp_path / "missing" / "trace.jsonl"))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rewarm-")]
