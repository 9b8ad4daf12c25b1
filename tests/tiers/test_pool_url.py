"""`pool:` URLs: what they say, what they refuse, and how capacity is divided."""

from __future__ import annotations

from pathlib import Path

import pytest

import rewarm
from rewarm.errors import ConfigError, StorageError
from rewarm.store.contract import Outcome
from rewarm.store.pool import read_facts
from rewarm.testing import make_keys
from rewarm.testing.kit.base import load, save
from rewarm.tiers.opening import open_tier, parse_pool_url
from rewarm.tiers.pool import PoolStore

MIB = 1 << 20


@pytest.fixture
def dirs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
    return paths


def held(path: Path) -> int:
    facts = read_facts(path)
    assert facts is not None
    return facts.capacity_bytes


def test_rewarm_open_opens_a_pool_and_blocks_outlive_it(dirs: list[Path]) -> None:
    a, b, _ = dirs
    keys = make_keys(40)
    with rewarm.open(f"pool:?drive={a}&drive={b}&capacity=64MiB", namespace="n") as pool:
        assert isinstance(pool, PoolStore)
        assert save(pool, keys) == [Outcome.STORED] * 40
        assert pool.stats().device.startswith("pool of 2")
    with rewarm.open(f"pool:?drive={b}&drive=file://{a}", namespace="n") as pool:
        assert load(pool, keys) == [Outcome.HIT] * 40
        assert pool.stats().capacity_bytes == 64 * MIB
    with rewarm.open(str(a), namespace="n") as alone:
        assert 0 < alone.lookup(keys).mask.sum() < 40, "a drive is a store of its own"


def test_capacity_is_the_sum_and_is_divided_evenly(dirs: list[Path]) -> None:
    a, b, c = dirs
    open_tier(f"pool:?drive={a}&drive={b}", capacity="33MiB").close()
    assert (held(a), held(b)) == (33 * MIB // 2, 33 * MIB - 33 * MIB // 2)
    with pytest.raises(ConfigError, match=r"its drives have .*leave capacity out, or give their sum"):
        open_tier(f"pool:?drive={a}&drive={b}&capacity=64MiB")
    with pytest.raises(ConfigError, match="give more"):
        open_tier(f"pool:?drive={a}&drive={b}&drive={c}&capacity=33MiB")
    open_tier(f"pool:?drive={a}&drive={b}&drive={c}&capacity=50MiB").close()
    assert held(c) == 17 * MIB


def test_a_drive_may_have_a_capacity_of_its_own(dirs: list[Path]) -> None:
    a, b, _ = dirs
    with open_tier(f"pool:?drive={a}?capacity=16MiB&drive={b}&capacity=64MiB") as pool:
        assert isinstance(pool, PoolStore)
        assert [drive.capacity_bytes for drive in pool.drives()] == [16 * MIB, 48 * MIB]


def test_options_go_to_every_drive_unless_it_says_otherwise(dirs: list[Path]) -> None:
    a, b, _ = dirs
    with open_tier(f"pool:?drive={a}?poll=3s&drive={b}&capacity=64MiB&device=threads&poll=2s") as pool:
        assert isinstance(pool, PoolStore)
        assert [drive.device for drive in pool.drives()] == ["threads", "threads"]
        assert [lane.store.stats().visibility_bound_s for lane in pool._lanes] == [3.0, 2.0]
        assert pool.stats().visibility_bound_s == 3.0


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pool:", "names no drive"),
        ("pool:?capacity=1TiB", "names no drive"),
        ("pool:/mnt/a?capacity=1TiB", "drives are options"),
        ("pool:?drive=/a&drives=/b", "did you mean 'drive'"),
        ("pool:?drive=/a&capcity=1TiB", "did you mean 'capacity'"),
        ("pool:?drive=/a&drive=/b&drive=/a", "drive /a stands twice"),
        ("pool:?drive=/a&order=shortest&order=arrival", "'order' stands twice"),
        ("pool:?drive=/a?capcity=1TiB", "did you mean 'capacity'"),
        ("pool:?drive=pool:", "is itself a pool"),
        ("pool:?drive", "cannot read the options"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pool_url(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("order=longest", "one of shortest, arrival"),
        ("order=arrival&ageing=3", "no meaning"),
        ("ageing=soon", "is no number"),
        ("ageing=0", "order=arrival"),
        ("ageing=nan", "above 0"),
        ("capacity=1MiB", "too small"),
        ("save_queue=much", "much"),
    ],
)
def test_a_bad_option_says_what_is_wrong(dirs: list[Path], options: str, message: str) -> None:
    more = "" if "capacity" in options else "&capacity=64MiB"
    with pytest.raises(ConfigError, match=message):
        open_tier(f"pool:?drive={dirs[0]}{more}&{options}")


def test_a_pool_opens_with_all_of_its_drives_or_not_at_all(dirs: list[Path]) -> None:
    a, missing = dirs[0], dirs[0].parent / "missing"
    with pytest.raises((ConfigError, StorageError), match="missing"):
        open_tier(f"pool:?drive={a}&drive={missing}&capacity=64MiB")
    with pytest.raises(ConfigError, match="no pool yet"):
        open_tier(f"pool:?drive={dirs[1]}")
    with pytest.raises(ConfigError, match="give it once"):
        open_tier(f"pool:?drive={a}&capacity=64MiB", capacity=1)
    with pytest.raises(ConfigError, match="at least one drive"):
        PoolStore([])
