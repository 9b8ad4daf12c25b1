"""Known faults of caches on disk whose symptom is a cache that stops being one: a small case each, named for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.store.faulty_store import WAIT_S, FaultyStore
from tests.store.faulty_store import load as load_from
from tests.store.faulty_store import save as save_to
from tests.store.neighbour import Neighbour
from tests.store.test_tailing import CAPACITY, load, open_pool, save

from rewarm.store.contract import Outcome
from rewarm.store.devices.base import READ, WRITE
from rewarm.store.layout import PAGE
from rewarm.store.opening import open_store
from rewarm.store.reading import ATTEMPTS_MAX
from rewarm.testing import make_keys, payload
from rewarm.testing.faulty import failure, stall

HIT, STORED, MISSING = Outcome.HIT, Outcome.STORED, Outcome.MISSING


def _bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in (root / "writers").rglob("*") if path.is_file())


def test_quota_forgotten_after_restart(tmp_path: Path) -> None:
    """Each process fills the pool to the brim; together they take what one may take."""
    capacity, size = 4 << 20, 128 << 10
    for life in range(3):
        keys = make_keys(28, str(life))
        with open_store(f"file://{tmp_path}?capacity={capacity}") as store:
            assert all(store.save(keys, [payload(key, size) for key in keys]).wait(WAIT_S)), "old ones make room"
            # 17 to 28 were seen: in a pool this small, logs take a good part, and are kept for ten minutes.
            assert store.lookup(keys).mask.sum() >= 12, "a good part of a pool is what was saved last"
        assert _bytes_on_disk(tmp_path) <= capacity


def test_staging_exhausted_and_lock_kept(tmp_path: Path) -> None:
    """A medium that hangs uses up the save queue: saves are refused at once, loads go on, and later all is well."""
    held, size = make_keys(2, "held"), 256 << 10
    with FaultyStore(tmp_path, f"&save_queue={2 * size}") as faulty:
        assert save_to(faulty.store, held, size) == [STORED] * 2
        faulty.writes.next(stall(), count=64, opcode=WRITE)
        hung = faulty.store.save(make_keys(2, "hung"), [bytes(size)] * 2)
        refused = faulty.store.save(make_keys(1, "over"), [bytes(size)])
        assert refused.outcomes == [Outcome.REFUSED_BUDGET], "not waited for"
        assert load_from(faulty.store, held, size) == [HIT] * 2
        hung.cancel()
        faulty.heal()
        assert hung.wait_released(WAIT_S)
        assert save_to(faulty.store, make_keys(1, "over"), size) == [STORED]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_and_key_stuck_for_ever(tmp_path: Path, error: int) -> None:
    """A save that found no room is refused, and nothing remembers it as saved or as under way."""
    keys = make_keys(2)
    with FaultyStore(tmp_path) as faulty:
        faulty.writes.chance(failure(error), 1.0, opcode=WRITE)
        assert save_to(faulty.store, keys, PAGE) == [Outcome.REFUSED_FULL] * 2
        assert load_from(faulty.store, keys, PAGE) == [MISSING] * 2
        faulty.heal()
        assert save_to(faulty.store, keys, PAGE) == [STORED] * 2
        assert load_from(faulty.store, keys, PAGE) == [HIT] * 2


def test_index_only_in_process_memory(tmp_path: Path) -> None:
    """The process that saved is killed; the next one finds everything."""
    url = f"file://{tmp_path}?capacity={CAPACITY}"
    with open_store(url, namespace="neighbours") as store:
        neighbour = Neighbour(url)
        assert neighbour.answer() == "open"
        assert neighbour.ask("save x 20 5000") == "stored=20"
        neighbour.kill()
    with open_store(url, namespace="neighbours") as store:
        assert load(store, make_keys(20, "x")) == [HIT] * 20


def test_one_bad_block_poisons_the_whole_prefix_and_is_never_repaired(tmp_path: Path) -> None:
    """One block of twelve is damaged: eleven are hits, and the next save of the prefix mends the one."""
    keys, bad = make_keys(12), 3
    with open_pool(tmp_path) as store:
        assert save(store, keys) == [STORED] * 12
    (segment,) = (tmp_path / "writers").glob("*/*.seg")
    with open(segment, "r+b") as file:
        file.seek(PAGE + bad * 2 * PAGE + 17)
        file.write(b"damage")
    with open_pool(tmp_path) as store:
        assert [outcome is HIT for outcome in load(store, keys)] == [i != bad for i in range(12)]
        assert store.lookup(keys).leading == bad, "the scheduler is told"
        assert save(store, keys).count(STORED) == 1
        assert load(store, keys) == [HIT] * 12
    with open_pool(tmp_path) as store:
        assert load(store, keys) == [HIT] * 12


def test_flat_directory_full(tmp_path: Path) -> None:
    """Thousands of blocks are a handful of names, so no directory gets slow or full."""
    keys = make_keys(3000)
    with open_pool(tmp_path) as store:
        assert all(store.save(keys, list(keys)).wait(WAIT_S))
    names = [len(os.listdir(folder)) for folder in (tmp_path, *tmp_path.rglob("*")) if folder.is_dir()]
    blocks_per_segment = (CAPACITY // 64 - PAGE) // PAGE
    assert max(names) <= len(keys) // blocks_per_segment + 10, "segments, and a log or several"


def test_retry_loop_on_a_vanished_block(tmp_path: Path) -> None:
    """A segment is removed behind the store's back: a few tries, a miss, and it is not offered again."""
    keys = make_keys(3)
    with FaultyStore(tmp_path, "&poll=1h") as faulty:
        assert save_to(faulty.store, keys, PAGE) == [STORED] * 3
    with FaultyStore(tmp_path, "&poll=1h") as faulty:
        (segment,) = (tmp_path / "writers").glob("*/*.seg")
        segment.unlink()
        assert load_from(faulty.store, keys, PAGE) == [MISSING] * 3
        assert faulty.reads.seen <= ATTEMPTS_MAX * len(keys)
        assert not faulty.store.lookup(keys).mask.any()
        assert load_from(faulty.store, keys, PAGE) == [MISSING] * 3
        assert save_to(faulty.store, keys, PAGE) == [STORED] * 3
        faulty.reads.next(failure(errno.ESTALE), count=10 * ATTEMPTS_MAX, opcode=READ)
        seen = faulty.reads.seen
        assert load_from(faulty.store, keys, PAGE) == [MISSING] * 3
        assert faulty.reads.seen - seen <= ATTEMPTS_MAX * len(keys)
