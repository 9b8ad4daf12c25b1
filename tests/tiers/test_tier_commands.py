"""The verbs that look after a pool take pools of drives, stacks and configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rewarm
from rewarm.cli.group import main
from rewarm.connectors.vllm.checks import Plan, run_checks
from rewarm.connectors.vllm.launch import launch
from rewarm.errors import ConfigError
from rewarm.testing import make_keys
from rewarm.testing.kit.base import save


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="rewarm")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A stack over directories; nothing is opened yet."""
    for name in ("a", "b", "shared"):
        (tmp_path / name).mkdir()
    path = tmp_path / "kv.toml"
    path.write_text(
        f'drives = ["{tmp_path}/a", "{tmp_path}/b"]\ncapacity = "64MiB"\ndram = "16MiB"\n'
        f'shared = "{tmp_path}/shared?capacity=32MiB"\n'
    )
    return path


def test_verbs_look_after_every_medium(config: Path) -> None:
    missing = run("inspect", str(config))
    assert (missing.exit_code, "holds no pool" in missing.stderr) == (2, True)
    keys = make_keys(64)
    with rewarm.open(config, namespace="n") as store:
        assert set(save(store, keys)) == {"stored"}
    media = json.loads(run("inspect", str(config), "--json").stdout)["media"]
    assert [one["blocks"] for one in media] == [32, 32, 64]
    pool = f"pool:?drive={config.parent}/a&drive={config.parent}/b"
    checked = run("check", pool, "--json")
    assert (checked.exit_code, json.loads(checked.stdout)["blocks"]) == (0, 64)
    text = run("metrics", pool).stdout
    assert [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("rewarm_blocks{")] == ["32.0"] * 2
    evicted = json.loads(run("evict", str(config), "--to", "1MiB", "--json").stdout)
    assert evicted["used_bytes"] <= 1 << 20
    assert run("erase", str(config), "--namespace", "n", "--yes").exit_code == 0
    with rewarm.open(config, namespace="n") as store:
        assert not store.lookup(keys).mask.any()


def test_the_launch_of_vllm_names_pools_and_files(config: Path) -> None:
    for url in (str(config), f"pool:?drive={config.parent}/a&drive={config.parent}/b&capacity=64MiB"):
        found = launch(url, version="0.32.0", staging_bytes=1 << 30)
        (tier,) = found.kv_transfer_config["kv_connector_extra_config"]["secondary_tiers"]
        assert tier["url"] == url
    with pytest.raises(ConfigError, match="ends with the engine's process"):
        launch(f"pool:?drive={config.parent}/a&drive=memory:x", version="0.32.0", staging_bytes=1 << 30)


def checks_of(url: str) -> dict[str, tuple[bool, str]]:
    plan = Plan(url=url, staging_bytes=4096, model=None, tokens=None, concurrency=1)
    return {check.part: (check.ok, check.what) for check in run_checks(plan)}


def test_checks_try_every_medium(config: Path) -> None:
    found = checks_of(str(config))
    assert found["directory"][0]
    assert found["directory"][1].count(" through ") == 3
    assert found["pool"][1].count("the first start makes one of 32.0 MiB") == 3
    (config.parent / "b").rmdir()
    assert checks_of(str(config))["directory"][1].startswith(f"{config.parent}/b is no directory")
    ok, what = checks_of(f"pool:?drive={config.parent}/a&capacity=1GiB&dram=1MiB&write_behind=1MiB")["pool"]
    assert (ok, "set dram to 2097152" in what) == (False, True)
