"""Known faults of caches on disk whose symptom is a wrong answer: one small case each, named for the symptom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.geometry.test_weights_fingerprint import base_weights
from tests.geometry.test_weights_fingerprint import save as save_weights
from tests.store.faulty_store import WAIT_S, FaultyStore, arena
from tests.store.faulty_store import load as load_from
from tests.store.faulty_store import save as save_to
from tests.store.test_tailing import SIZE, load, open_pool, save

from rewarm.geometry import directory_namespace
from rewarm.store.contract import Outcome
from rewarm.store.devices.base import READ, WRITE
from rewarm.store.layout import PAGE
from rewarm.testing import make_keys, payload
from rewarm.testing.faulty import stall, torn_write

HIT, STORED, CORRUPT, MISSING = Outcome.HIT, Outcome.STORED, Outcome.CORRUPT, Outcome.MISSING


@pytest.mark.parametrize("grown_again", [False, True])
def test_stale_bytes_after_truncation(tmp_path: Path, grown_again: bool) -> None:
    """A file that ends too early is read into a buffer that still holds another block: that block is no answer."""
    keys = make_keys(2)
    with open_pool(tmp_path) as store:
        assert save(store, keys) == [STORED] * 2
    (segment,) = (tmp_path / "writers").glob("*/*.seg")
    end = segment.stat().st_size
    os.truncate(segment, end - 2 * PAGE)
    if grown_again:
        os.truncate(segment, end)
    with open_pool(tmp_path) as store:
        buffer = bytearray(payload(keys[0], SIZE))
        transfer = store.load(keys[1:], [buffer])
        assert transfer.wait(WAIT_S) == [False]
        assert transfer.outcomes == [CORRUPT]
        assert save(store, keys[1:]) == [STORED]
        assert load(store, keys) == [HIT] * 2


def test_second_writer_publishes_half_a_file(tmp_path: Path) -> None:
    """Two writers save one key at the same time, and the medium keeps half of what one of them wrote."""
    keys, size = make_keys(1), 64 << 10
    with FaultyStore(tmp_path, "&poll=1h") as first, FaultyStore(tmp_path, "&poll=1h") as second:
        first.writes.next(torn_write(), opcode=WRITE)
        second.writes.next(stall(), opcode=WRITE)
        slow = second.store.save(keys, [payload(keys[0], size)])
        assert save_to(first.store, keys, size) == [STORED]
        with FaultyStore(tmp_path, "&poll=1h") as reader:
            assert load_from(reader.store, keys, size) == [CORRUPT]
            second.writes.release_stalled()
            assert slow.wait(WAIT_S) == [True]
            reader.store.refresh()
            assert load_from(reader.store, keys, size) == [HIT]


def test_hash_seed_differs(tmp_path: Path) -> None:
    """Keys and namespaces mean the same in a process with another seed of Python's hash."""
    script = (
        "import sys; from pathlib import Path; from tests.store.test_tailing import *; "
        "root, verb = Path(sys.argv[1]), {'save': save, 'load': load}[sys.argv[2]]; "
        "store = open_pool(root, namespace='seeds'); print(*verb(store, make_keys(3))); store.close()"
    )
    for seed, verb, answer in (("1", "save", "stored"), ("2", "load", "hit")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script, str(tmp_path), verb]
        root = Path(__file__).resolve().parents[3]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=WAIT_S)
        assert done.stdout.split() == [answer] * 3, done.stderr


def _engine(model: Path, **changes: object) -> object:
    parts = {"kv_dtype": "bf16", "block_tokens": 16, "layout": "NHD", "tp": 2, "pp": 1, "rank_split": True}
    return directory_namespace(model, **(parts | changes))  # type: ignore[arg-type]


def _model(folder: Path, nudge: float = 0.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "hidden_size": 64}))
    weights = base_weights()
    weights["layers.0.q.weight"] = weights["layers.0.q.weight"] + np.float32(nudge)
    save_weights(folder / "model.safetensors", weights)
    return folder


def test_foreign_layout_served(tmp_path: Path) -> None:
    """One model, one prompt, equal keys; but blocks cut, ordered, rounded or split in another way."""
    model, pool, keys = _model(tmp_path / "model"), tmp_path / "pool", make_keys(3)
    pool.mkdir()
    with open_pool(pool, namespace=_engine(model)) as store:
        save(store, keys)
    for change in ({"layout": "HND"}, {"block_tokens": 32}, {"kv_dtype": "fp8_e4m3"}, {"tp": 1}, {"rank_split": False}):
        with open_pool(pool, namespace=_engine(model, **change)) as store:
            assert load(store, keys) == [MISSING] * 3, change
    with open_pool(pool, namespace=_engine(model)) as store:
        assert load(store, keys) == [HIT] * 3


def test_fine_tuned_weights_under_the_same_name_served(tmp_path: Path) -> None:
    """The directory's name, its configuration and all shapes are equal; one matrix was trained a little."""
    base, tuned = tmp_path / "a", tmp_path / "b"
    base.mkdir()
    tuned.mkdir()
    pool, keys = tmp_path / "pool", make_keys(3)
    pool.mkdir()
    with open_pool(pool, namespace=_engine(_model(base / "model"))) as store:
        save(store, keys)
    with open_pool(pool, namespace=_engine(_model(tuned / "model", 1e-4))) as store:
        assert load(store, keys) == [MISSING] * 3
        assert save(store, keys) == [STORED] * 3


@pytest.mark.parametrize("bounce", ["auto", "always"])
def test_late_dma_into_memory_given_back(tmp_path: Path, bounce: str) -> None:
    """A read that was given up completes afterwards: the memory is not given back before, or not written to."""
    keys = make_keys(1)
    with FaultyStore(tmp_path, f"&bounce={bounce}") as faulty:
        assert save_to(faulty.store, keys, PAGE) == [STORED]
        faulty.reads.next(stall(), opcode=READ)
        memory = arena(1, PAGE)
        transfer = faulty.store.load(keys, memory)
        assert transfer.wait(0.05) == [False]
        assert transfer.wait_released(WAIT_S if bounce == "always" else 0.05) == (bounce == "always")
        if bounce == "always":
            memory[:] = 0x5A
        assert faulty.reads.release_stalled() == 1
        assert transfer.wait_released(WAIT_S)
        memory[:] = 0x5A
        assert load_from(faulty.store, keys, PAGE) == [HIT]
        assert (memory == 0x5A).all()
        assert transfer.outcomes == [Outcome.TIMED_OUT], "a verdict is final"
