"""What must not share pages does not: ranks, weights, layouts, element types; what cannot be known is refused."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.remote import Remote, RemoteError
from tests.sglang.conftest import ENVIRONMENT, keys

pytestmark = pytest.mark.sglang


def found(
    worker: Remote, url: str, *, kind: str = "mha", layout: str = "page_first", dtype: str = "bfloat16", **options: Any
) -> int:
    """How many of four pages a backend of this kind finds; then it stores them."""
    worker.ask("pool", name="p", kind=kind, layout=layout, dtype=dtype)
    worker.ask("attach", backend="b", pool="p", url=url, **options)
    there = worker.ask("exists", backend="b", keys=keys(4))
    assert all(worker.ask("set", backend="b", keys=keys(4), pages=[0, 1, 2, 3]))
    worker.ask("close", backend="b")
    return int(there)


def test_ranks(worker: Remote, url: str) -> None:
    assert found(worker, url, tp_rank=0, tp_size=2) == 0
    assert found(worker, url, tp_rank=1, tp_size=2) == 0, "each rank has heads of its own"
    assert found(worker, url, tp_rank=1, tp_size=2) == 4
    assert found(worker, url, tp_rank=0, tp_size=1) == 0
    assert found(worker, url, tp_rank=0, tp_size=2, pp_size=2, pp_rank=1) == 0
    latent = {"kind": "mla", "is_mla_model": True, "tp_size": 2}
    assert found(worker, url, tp_rank=0, **latent) == 0
    assert found(worker, url, tp_rank=1, **latent) == 4, "latents are the same on every rank"


def test_layouts_and_element_types(worker: Remote, url: str) -> None:
    assert found(worker, url) == 0
    assert found(worker, url, layout="page_first_direct") == 0
    assert found(worker, url, layout="page_head") == 0
    assert found(worker, url, dtype="float16") == 0
    assert found(worker, url, namespace="other") == 0
    assert found(worker, url) == 4


def test_weights(worker: Remote, url: str, tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("two", 2), ("copy", 1)):
        worker.ask("weights", path=str(tmp_path / name), seed=seed)
    assert found(worker, url, namespace=None, model=str(tmp_path / "one")) == 0
    assert found(worker, url, namespace=None, model=str(tmp_path / "two")) == 0
    assert found(worker, url, namespace=None, model=str(tmp_path / "copy")) == 4


def test_the_engines_own_arguments(worker: Remote, url: str, tmp_path: Path) -> None:
    worker.ask("weights", path=str(tmp_path / "m"), seed=1)
    model = str(tmp_path / "m")
    try:
        worker.ask("publish", model_path=model)
        assert found(worker, url, namespace=None) == 0
        assert found(worker, url, namespace=None) == 4
        worker.ask("publish", model_path=model, json_model_override_args='{"rope_theta": 5}')
        assert found(worker, url, namespace=None) == 0
        for arguments, what in (
            ({"enable_lora": True}, "LoRA"),
            ({"load_format": "dummy"}, "dummies"),
            ({"model_path": "no/such-model"}, "no directory here"),
        ):
            worker.ask("publish", **{"model_path": model, **arguments})
            with pytest.raises(RemoteError, match=f"ConfigError: .*{what}"):
                found(worker, url, namespace=None)
    finally:
        worker.ask("publish")


def test_what_cannot_work_stops_the_start(worker: Remote, url: str) -> None:
    for options, what in (
        ({"layout": "layer_first"}, "page_first_direct"),
        ({"namespace": None}, "which model"),
        ({"namespace": " "}, "empty"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"deadlin": "1s"}, "did you mean 'deadline'"),
        ({"deadline": "0s"}, "above 0"),
    ):
        with pytest.raises(RemoteError, match=f"ConfigError: .*{what}"):
            found(worker, url, **options)
    with pytest.raises(RemoteError, match=r"ConfigError: .*missing"):
        found(worker, "file:///missing/directory?capacity=1GiB")
    with pytest.raises(RemoteError, match=r'ConfigError: .*needs "url"'):
        found(worker, "")


def test_prefixes_of_several_pools_as_sglangs_own_backend_sees_them(worker: Remote, url: str, tmp_path: Path) -> None:
    """The same pages are stored in both at random; both must say the same of every prefix."""
    worker.ask("pool", name="p", kind="mha", layout="page_first")
    worker.ask("pool", name="q", kind="mha", layout="page_first_direct")
    worker.ask("fill", pool="q", seed=7)
    right = worker.ask("digests", pool="q")
    worker.ask("attach", backend="ours", pool="p", url=url)
    worker.ask("attach", backend="theirs", pool="p", url=str(tmp_path / "theirs"), kind="file")
    for backend in ("ours", "theirs"):
        for name, pool in (("kv", "p"), ("swa", "q"), ("indexer", "q")):
            worker.ask("side", backend=backend, pool=pool, name=name)
    dice = random.Random(8)
    for turn in range(12):
        every = keys(10, f"turn {turn}")
        for name, share in (("kv", 0.9), ("swa", 0.6), ("indexer", 0.8)):
            pages = [page for page in range(10) if dice.random() < share]
            for backend in ("ours", "theirs"):
                good = worker.ask("set_v2", backend=backend, pool=name, keys=[every[p] for p in pages], pages=pages)
                assert good == {name: [True] * len(pages)}
        for transfers in (
            [],
            [["indexer", "all_pages", 0]],
            [["swa", "trailing_pages", dice.randrange(1, 4)]],
            [["indexer", "all_pages", 0], ["swa", "trailing_pages", 2]],
        ):
            ours, theirs = (
                worker.ask("exists_v2", backend=backend, keys=every, transfers=transfers)
                for backend in ("ours", "theirs")
            )
            assert ours == theirs, transfers
    worker.ask("set_v2", backend="ours", pool="swa", keys=keys(16, "last"), pages=list(range(16)))
    worker.ask("fill", pool="q", seed=9)
    assert worker.ask("get_v2", backend="ours", pool="swa", keys=keys(16, "last"), pages=list(range(16))) == {
        "swa": [True] * 16
    }
    assert worker.ask("digests", pool="q") == right
    assert worker.ask("exists", backend="ours", keys=keys(16, "last")) == 0, "a page of one pool is none of another"
    worker.ask("close", backend="ours")


def test_the_command_tries_all_of_it(worker: Remote, url: str, tmp_path: Path) -> None:
    worker.ask("weights", path=str(tmp_path / "m"), seed=1)
    command = [ENVIRONMENT / "bin" / "python", "-m", "rewarm", "connect", "sglang", url]
    tried = subprocess.run([*command, "--model", tmp_path / "m", "--check", "--json"], capture_output=True, check=False)
    assert tried.returncode == 0, tried.stdout.decode() + tried.stderr.decode()
    answer = json.loads(tried.stdout)
    assert [check["part"] for check in answer["checks"]] == ["engine", "interface", "directory", "pool", "weights"]
