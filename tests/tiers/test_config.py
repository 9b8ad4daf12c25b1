"""Configuration files: strict, the same as the URL, documented; and `rewarm config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rewarm
from rewarm.cli import main
from rewarm.errors import ConfigError
from rewarm.testing import make_keys
from rewarm.testing.kit.base import load, save
from rewarm.tiers.config import KEYS, make_config, read_config, reference_page
from rewarm.tiers.opening import POOL_OPTIONS, parse_pool_url
from rewarm.tiers.pool import PoolStore

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="rewarm")


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "drive a&b", tmp_path / "c"]
    for path in paths:
        path.mkdir()
    return paths


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kv.toml"
    path.write_text(text)
    return str(path)


def test_a_file_opens_like_its_url(tmp_path: Path, drives: list[Path]) -> None:
    file = written(tmp_path, f'drives = ["{drives[0]}", "{drives[1]}?poll=7s"]\ncapacity = "64MiB"\npoll = "2s"\n')
    keys = make_keys(40)
    with rewarm.open(file, namespace="n") as pool:
        assert isinstance(pool, PoolStore)
        assert [drive.drive for drive in pool.drives()] == [str(path) for path in drives]
        assert [lane.store.stats().visibility_bound_s for lane in pool._lanes] == [2.0, 7.0]
        assert all(outcome == "stored" for outcome in save(pool, keys))
    with rewarm.open(read_config(file).url(), namespace="n") as pool:
        assert all(outcome == "hit" for outcome in load(pool, keys))


def test_a_directory_may_have_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").mkdir()
    with rewarm.open(str(tmp_path / "pool.toml"), capacity="64MiB") as store:
        assert not isinstance(store, PoolStore)


def test_keys_are_the_options_of_the_url_and_at_most_25() -> None:
    assert {key.name for key in KEYS} - {"drives"} == set(POOL_OPTIONS) - {"drive"}
    assert len(KEYS) <= 25


def test_every_value_goes_through_the_url() -> None:
    table = {
        "drives": ["/mnt/a", "memory:"], "capacity": 1 << 40, "order": "shortest", "ageing": 2.5, "save_queue": "2GiB",
        "poll": "2s", "io_deadline": "5s", "close_timeout": "6s", "device": "threads", "access": "group",
        "bounce": "always", "io": "process", "dram": "8GiB", "shared": "/mnt/array/kv?capacity=1PiB",
        "write_behind": "2GiB", "admission": "min-tokens=1024", "block_tokens": 256,
    }  # fmt: skip
    assert set(table) == {key.name for key in KEYS}
    location = parse_pool_url(make_config(table, "kv.toml").url())
    assert [name for name, _ in location.media()] == ["/mnt/a", "memory:", "/mnt/array/kv"]
    assert location.options == {name: str(value) for name, value in table.items() if name != "drives"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'drives' must be a list"),
        ("drives = []", "'drives' must be a list"),
        ('drives = "/mnt/a"', "'drives' must be a list"),
        ('drives = ["/a"]\ncapcity = "1TiB"', "did you mean 'capacity'"),
        ('drives = ["/a"]\nxyzzy = 1', "one of drives, capacity"),
        ('drives = ["/a"]\ncapacity = "1 parsec"', "'capacity': .*parsec"),
        ('drives = ["/a"]\ncapacity = true', "'capacity' is one value"),
        ('drives = ["/a"]\ncapacity = 0', "'capacity': .*above 0"),
        ('drives = ["/a"]\norder = "shortst"', "'order': .*did you mean 'shortest'"),
        ('drives = ["/a"]\norder = "arrival"\nageing = 3', "no meaning"),
        ('drives = ["/a"]\nageing = -1', "'ageing': .*above 0"),
        ('drives = ["/a"]\npoll = "2 days"', "'poll'"),
        ('drives = ["/a"]\nshared = "/b"', "'shared' needs dram"),
        ('drives = ["/a"]\ndram = "1GiB"\nshared = ""', "'shared': is empty"),
        ('drives = ["/a"]\ndram = "1GiB"\nadmission = "al"', "'admission': .*did you mean 'all'"),
        ('drives = ["/a"]\ndram = "1GiB"\nblock_tokens = 0', "'block_tokens': .*above 0"),
        ("drives = [", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_config(file)
    assert file in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        rewarm.open(str(tmp_path / "none.toml"))


def test_show_prints_every_key_and_the_url(tmp_path: Path) -> None:
    file = written(tmp_path, 'drives = ["/mnt/a"]\ncapacity = "1TiB"\n')
    result = run("config", "show", file)
    assert result.exit_code == 0
    assert all(key.name in result.stdout for key in KEYS)
    assert "pool:?drive=/mnt/a&capacity=1TiB" in result.stdout
    shown = {row["key"]: row for row in json.loads(run("config", "show", file, "--json").stdout)["keys"]}
    assert shown["capacity"]["source"] == "file"
    assert (shown["order"]["value"], shown["order"]["source"]) == ("shortest", "default")
    assert run("config", "show", written(tmp_path, "drivs = []")).exit_code == 2


def test_check_looks_at_the_drives_and_makes_nothing(tmp_path: Path, drives: list[Path]) -> None:
    file = written(tmp_path, f'drives = ["{drives[0]}"]\ncapacity = "64MiB"\n')
    result = run("config", "check", file)
    assert (result.exit_code, list(drives[0].iterdir())) == (0, [])
    assert "nothing found" in result.stdout

    missing = tmp_path / "missing"
    listed = ", ".join(f'"{path}"' for path in (*drives, missing, "memory:"))
    result = run("config", "check", written(tmp_path, f'drives = [{listed}]\ncapacity = "4000TiB"\n'), "--json")
    assert result.exit_code == 1
    concerns = [(row["drive"], row["what"]) for row in json.loads(result.stdout)["concerns"]]
    for drive, what in [
        (str(drives[0]), "in all"),
        (str(drives[1]), "same file system"),
        (str(missing), "no directory"),
        ("memory:", "this process's memory"),
    ]:
        assert any(drive == name and what in text for name, text in concerns), (drive, concerns)
    no_capacity = run("config", "check", written(tmp_path, f'drives = ["{drives[0]}"]\n'))
    assert no_capacity.exit_code == 1
    assert "set capacity" in no_capacity.stdout


def test_the_reference_page_is_made_from_the_keys() -> None:
    assert (ROOT / "docs" / "reference" / "config.md").read_text() == reference_page()
