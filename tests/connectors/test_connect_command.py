"""`rewarm connect vllm URL`: the command line it prints is the one vLLM takes, and `--check` finds what is wrong."""

from __future__ import annotations

import json
import mmap
import os
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.connectors.conftest import Install

from rewarm.cli import exits
from rewarm.cli.group import main
from rewarm.connectors.vllm.checks import Plan, run_checks
from rewarm.connectors.vllm.launch import launch
from rewarm.errors import ConfigError


def plan(pool: Path, **changes: object) -> Plan:
    """A start that needs little."""
    values = {"staging_bytes": 4096, "model": None, "tokens": None, "concurrency": 1, **changes}
    return Plan(url=f"file://{pool}?capacity=1GiB", **values)  # type: ignore[arg-type]


def outcomes(made: Plan, shared_memory: Path) -> dict[str, tuple[bool, str]]:
    """What each check said."""
    return {check.part: (check.ok, check.what) for check in run_checks(made, shared_memory)}


def test_the_command_line_can_be_pasted_into_a_shell() -> None:
    found = launch(
        "/mnt/kv?capacity=2TiB", version="0.32.0", staging_bytes=1 << 30, model="my model", tensor_parallel=4
    )
    words = shlex.split(found.command.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "my model"]
    assert words[words.index("--tensor-parallel-size") + 1] == "4"
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config == found.kv_transfer_config
    assert config["kv_connector_extra_config"]["spec_name"] == "TieringOffloadingSpec"
    assert config["kv_connector_extra_config"]["cpu_bytes_to_use"] == 1 << 30
    assert config["kv_connector_extra_config"]["secondary_tiers"][0]["url"] == "/mnt/kv?capacity=2TiB"


def test_the_cpu_build_gets_the_spec_of_its_own_and_a_server_that_starts() -> None:
    found = launch("/mnt/kv", version="0.32.0+cpu", staging_bytes=1, namespace="n")
    extra = found.kv_transfer_config["kv_connector_extra_config"]
    assert extra["spec_module_path"] == "rewarm.connectors.vllm_cpu"
    assert extra["secondary_tiers"][0]["namespace"] == "n"
    assert found.command.startswith("python -m vllm.entrypoints.openai.api_server")


def test_a_store_that_ends_with_the_process_and_unknown_versions_are_refused() -> None:
    with pytest.raises(ConfigError, match="ends with"):
        launch("memory:", version="0.32.0", staging_bytes=1)
    with pytest.raises(ConfigError, match="supported"):
        launch("/mnt/kv", version="0.20.0", staging_bytes=1)


def test_all_is_well(install: Install, tmp_path: Path) -> None:
    install()
    shared = tmp_path / "shm"
    shared.mkdir()
    found = outcomes(plan(tmp_path, model="llama-3.1-8b", tokens=16, staging_bytes=1 << 24), shared)
    assert {part: ok for part, (ok, _) in found.items() if not ok} == {}
    assert found["engine"][1] == "vLLM 0.32.0"
    assert not (tmp_path / "pool.json").exists(), "a check makes no pool"


def test_each_part_that_fails_says_what_to_do(install: Install, tmp_path: Path) -> None:
    install(random_seed=True)
    with _map(tmp_path / "vllm_offload_live.mmap"):
        (tmp_path / "vllm_offload_dead.mmap").write_bytes(bytes(8192))
        made = Plan(
            url=f"file://{tmp_path}/missing",
            staging_bytes=1 << 60,
            model="llama-3.1-8b",
            tokens=1 << 30,
            concurrency=99999,
        )
        found = outcomes(made, tmp_path)
    assert [part for part, (ok, _) in found.items() if ok] == ["engine", "interface"]
    assert "PYTHONHASHSEED" in found["hash seed"][1]
    assert "missing" in found["directory"][1]
    assert "--staging" in found["staging"][1]
    assert "--shm-size" in found["shared memory"][1]
    assert "vllm_offload_dead.mmap (8.0 KiB)" in found["stale regions"][1]
    assert "live" not in found["stale regions"][1]


def test_without_an_engine_the_command_says_so_and_checks_fail(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["connect", "vllm", f"{tmp_path}?capacity=1GiB"])
    assert shown.exit_code == 0
    assert "--kv-transfer-config" in shown.output
    assert "not installed" in shown.stderr
    checked = CliRunner().invoke(main, ["connect", "vllm", f"{tmp_path}?capacity=1GiB", "--check", "--json"])
    assert checked.exit_code == 1
    checks = json.loads(checked.stdout)["checks"]
    assert {check["part"]: check["ok"] for check in checks}["engine"] is False
    assert {check["part"]: check["ok"] for check in checks}["directory"] is True


def _map(path: Path) -> mmap.mmap:
    """Map a file, as an engine that runs does."""
    path.write_bytes(bytes(4096))
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 4096)
    finally:
        os.close(descriptor)


def test_record_prints_the_command_that_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    shown = CliRunner().invoke(main, ["record", "vllm", str(tmp_path), str(trace), "--model", "m", "--json"])
    assert shown.exit_code == exits.OK, shown.stderr
    answer = json.loads(shown.stdout)
    found = answer.get("launch", answer)["kv_transfer_config"]["kv_connector_extra_config"]["secondary_tiers"][0]
    assert (found["record"], found["url"]) == (str(trace), f"file://{tmp_path}")
    refused = CliRunner().invoke(main, ["record", "vllm", str(tmp_path), "/no/folder/trace.jsonl"])
    assert refused.exit_code == exits.USAGE
    assert "no directory" in refused.stderr
