"""The LMCache plug-in without LMCache: keys and namespaces, waiting and locks, and that every task is answered."""

from __future__ import annotations

import importlib
import json
import math
import os
import select
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.connectors import fake_lmcache
from tests.connectors.conftest import write_weights
from tests.connectors.fake_lmcache import item, key

from rewarm.cli.group import main
from rewarm.connectors.lmcache import waiting
from rewarm.connectors.lmcache.keys import OPAQUE, layout_of, name_of, read_options
from rewarm.connectors.lmcache.launch import launch
from rewarm.connectors.lmcache.versions import release_of
from rewarm.connectors.lmcache.waiting import Completions, Locks
from rewarm.errors import ConfigError
from rewarm.store.contract import Outcome

WAIT_S = 10.0


# Keys and namespaces.


def test_importing_the_package_imports_no_lmcache() -> None:
    code = "import sys, rewarm.connectors.lmcache as l; assert 'lmcache' not in sys.modules; l.RewarmL2AdapterConfig"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "AttributeError: module 'rewarm.connectors.lmcache'" in result.stderr


def test_every_part_of_a_key_is_told_apart() -> None:
    keys = [
        key(1),
        key(2),
        key(1, kv_rank=1),
        key(1, object_group_id=1),
        key(1, model_name="n"),
        key(1, model_name="", cache_salt="m"),
        key(1, cache_salt="tenant"),
        key(1, model_name="mt", cache_salt="enant"),
    ]
    assert len({name_of(k) for k in keys}) == len(keys)
    assert name_of(key(1)) == name_of(key(1))


def test_layouts_are_told_apart_but_for_plain_rows() -> None:
    layouts = [
        ([(2, 4, 64)], ["torch.bfloat16"]),
        ([(2, 4, 64)], ["torch.float16"]),
        ([(2, 64, 4)], ["torch.bfloat16"]),
        ([(2, 4, 64), (1, 2)], ["torch.bfloat16", "torch.float16"]),
        ([(100,)], ["torch.uint8"]),
    ]
    assert len({layout_of(*layout) for layout in layouts}) == len(layouts)
    assert layout_of([], []) == layout_of([(7,)], ["torch.uint8"]) == OPAQUE


def test_weights_engine_and_release_are_the_namespace(tmp_path: Path) -> None:
    one, other = write_weights(tmp_path / "a"), write_weights(tmp_path / "b", 1)
    for model in (one, other):
        (model / "config.json").write_text('{"model_type": "qwen3"}')

    def digest(release: str = "0.5.6", **params: object) -> bytes:
        values = {"url": "/kv", "model": str(one), "engine": "vllm 0.32", **params}
        return read_options(values, release).namespace.digest

    assert digest() == digest(deadline="1s")
    digests = [digest(), digest("0.5.7"), digest(model=str(other)), digest(engine="vllm 0.33")]
    digests.append(digest(model=None, namespace="mine"))
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"namespace": "n"}, 'needs "url"'),
        ({"url": "/kv"}, "which weights and which engine"),
        ({"url": "/kv", "model": "/m"}, "which weights and which engine"),
        ({"url": "/kv", "model": "/m", "engine": "e", "namespace": "n"}, "which weights and which engine"),
        ({"url": "/kv", "namespace": "n", "deadlin": "1s"}, "did you mean 'deadline'"),
        ({"url": "/kv", "namespace": "n", "deadline": "0s"}, "above 0"),
    ],
)
def test_bad_parameters_say_what_to_change(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_options(params, "0.5.6")


def test_candidates_belong_to_their_release_and_others_are_refused() -> None:
    assert release_of("0.5.7rc2") == "0.5.7"
    for version in (None, "0.5.5", "1.5.6", "nonsense"):
        with pytest.raises(ConfigError, match=r"0\.5\.6, 0\.5\.7"):
            release_of(version)


def test_the_command_line_can_be_pasted_into_a_shell() -> None:
    found = launch("/mnt/my kv?capacity=2TiB", version="0.5.6", staging_bytes=3 << 29, namespace="it's mine")
    words = shlex.split(found.command.replace("\\\n", " "))
    assert words[:4] == ["lmcache", "server", "--l1-size-gb", "1.5"]
    assert json.loads(words[words.index("--l2-adapter") + 1]) == found.l2_adapter
    assert found.l2_adapter["adapter_params"] == {"url": "/mnt/my kv?capacity=2TiB", "namespace": "it's mine"}
    assert any("MODEL" in note for note in launch("/kv", version="0.5.6", staging_bytes=1).notes)
    with pytest.raises(ConfigError, match="ends with"):
        launch("memory:", version="0.5.6", staging_bytes=1)
    with pytest.raises(ConfigError, match="either"):
        launch("/kv", version="0.5.6", staging_bytes=1, namespace="n", model="/m")


# Waiting and locks.


class Held:
    """A pin."""

    def __init__(self, count: int = 0) -> None:
        self.released = False
        self.mask = np.ones(count, np.bool_)

    def release(self) -> None:
        self.released = True


def test_a_pin_is_held_until_every_key_is_unlocked() -> None:
    locks, first, second = Locks(), Held(), Held()
    locks.lock(["a", "b"], first)  # type: ignore[arg-type]
    locks.lock(["b"], second)  # type: ignore[arg-type]
    locks.unlock(["b", "unknown"])
    assert "b" in locks.held
    assert not first.released
    locks.unlock(["a"])
    assert first.released
    assert not second.released
    locks.unlock(["b", "b"])
    assert second.released
    assert locks.held == {}


def test_a_lock_that_is_never_given_back_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    locks, lost, next_one = Locks(), Held(), Held()
    monkeypatch.setattr(waiting, "LOCK_S", 0.0)
    locks.lock(["a"], lost)  # type: ignore[arg-type]
    monkeypatch.setattr(waiting, "LOCK_S", 600.0)
    locks.lock(["b"], next_one)  # type: ignore[arg-type]
    assert lost.released
    assert "a" not in locks.held
    locks.unlock(["a"])
    assert not next_one.released
    locks.release(math.inf)
    assert next_one.released


class Slow:
    """A transfer whose verdict and release come when the test says so."""

    def __init__(self, count: int = 1) -> None:
        self.outcomes: list[Outcome | None] = [None] * count
        self._event = fake_lmcache.Event()
        self._released = threading.Event()

    def settle(self, outcome: Outcome) -> None:
        self.outcomes = [outcome for _ in self.outcomes]
        self._event.notify()

    def release(self) -> None:
        self._released.set()

    def done(self) -> bool:
        return None not in self.outcomes

    def released(self) -> bool:
        return self._released.is_set()

    def wait(self, timeout: float | None = None) -> list[bool]:
        if not self.done():
            self.settle(Outcome.TIMED_OUT)
        return []

    def wait_released(self, timeout: float | None = None) -> bool:
        return self._released.wait(timeout)

    def fileno(self) -> int:
        return self._event.fileno()


def test_nothing_is_over_before_its_memory_is_released() -> None:
    completions, over = Completions(), threading.Event()
    late, quick, ended = Slow(), Slow(), threading.Event()
    completions.add(late, 0.0, over.set)  # type: ignore[arg-type]
    completions.add(quick, WAIT_S, ended.set)  # type: ignore[arg-type]
    quick.settle(Outcome.HIT)
    quick.release()
    assert ended.wait(WAIT_S)  # the late one holds nobody up
    assert late.outcomes == [Outcome.TIMED_OUT]
    assert not over.is_set()
    assert not completions.stop(0.05)
    late.release()
    assert over.wait(WAIT_S)
    assert completions.stop(WAIT_S)


# The adapter.


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes adapters over a pool in a directory, or over a given store."""
    for name, module in fake_lmcache.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rewarm.connectors.lmcache.adapter", raising=False)
    module = importlib.import_module("rewarm.connectors.lmcache.adapter")
    monkeypatch.setattr(module, "installed_version", lambda: "0.5.6")
    made: list[Any] = []

    def adapter(store: Any = None, **params: Any) -> Any:
        if store is not None:
            monkeypatch.setattr(module, "open_tier", lambda *_args, **_options: store)
        url = f"file://{tmp_path}?capacity=16MiB&device=threads"
        made.append(module.RewarmL2Adapter({"url": url, "namespace": "tests", **params}))
        return made[-1]

    yield adapter
    for one in made:
        one.close()
    sys.modules.pop("rewarm.connectors.lmcache.adapter", None)


def signalled(descriptor: int) -> bool:
    """Whether an event comes; it is taken."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(WAIT_S * 1000)) and os.eventfd_read(descriptor) > 0


def stored(adapter: Any, keys: list[Any], items: list[Any]) -> int:
    """Result of a store task."""
    task = adapter.submit_store_task(keys, items)
    assert signalled(adapter.get_store_event_fd())
    return int(adapter.pop_completed_store_tasks()[task])


def loaded(adapter: Any, keys: list[Any], items: list[Any]) -> list[bool]:
    """Bits of a load task."""
    task = adapter.submit_load_task(keys, items)
    assert signalled(adapter.get_load_event_fd())
    return list(adapter.query_load_result(task).bits)


def found(adapter: Any, keys: list[Any], descriptions: dict[int, Any] | None = None) -> list[bool]:
    """Bits of a look-up, whose locks are kept."""
    task = adapter.submit_lookup_and_lock_task(keys, descriptions or {})
    bits = list(adapter.query_lookup_and_lock_result(task).bits)
    assert adapter.query_lookup_and_lock_result(task) is None
    return bits


def test_objects_go_and_come_and_are_accounted_for(make: Callable[..., Any]) -> None:
    adapter, keys = make(), [key(i) for i in range(3)]
    items = [item(bytes([i]) * (4096 + i)) for i in range(3)]
    assert stored(adapter, keys, items) == 3 * 4096 + 3
    assert stored(adapter, keys, items) == 0  # already there: nothing moved, and no failure
    assert adapter.stored == {k: 4096 + i for i, k in enumerate(keys)}
    back = [item(bytes(4096 + i)) for i in range(3)]
    assert found(adapter, [*keys, key(9)]) == [True, True, True, False]
    described = SimpleNamespace(shapes=[(2, 4)], dtypes=["torch.bfloat16"])
    assert found(adapter, keys, {0: described}) == [True] * 3  # plain rows are never described
    assert loaded(adapter, [*keys, key(9)], [*back, item(b"12345678")]) == [True, True, True, False]
    assert [bytes(b.data) for b in back] == [bytes(i.data) for i in items]
    assert adapter.accessed == keys
    assert adapter.report_status()["failures"] == {"load: missing": 1}


def test_locked_objects_are_not_deleted_and_deleted_ones_are_a_miss(make: Callable[..., Any]) -> None:
    adapter, keys = make(), [key(i) for i in range(3)]
    stored(adapter, keys, [item(b"x" * 4096) for _ in keys])
    found(adapter, keys[:1])
    adapter.delete(keys[:2])
    assert set(adapter.stored) == {keys[0], keys[2]}
    adapter.submit_unlock(keys[:1])
    assert found(adapter, keys) == [True, False, True]
    first, token = adapter.list_l2_keys(page_size=1)
    second, end = adapter.list_l2_keys(page_size=1, cursor=token)
    assert {name for name, _ in (*first, *second)} == {k.to_encoded_object_key() for k in (keys[0], keys[2])}
    assert end is None
    assert adapter.list_l2_keys(model_name="other") == ((), None)
    with pytest.raises(ValueError, match="page_size"):
        adapter.list_l2_keys(page_size=0)


def test_another_size_is_a_failed_load_and_not_offered_again(make: Callable[..., Any]) -> None:
    adapter = make()
    stored(adapter, [key(1)], [item(b"x" * 4096)])
    assert loaded(adapter, [key(1)], [item(b"x" * 100)]) == [False]
    assert found(adapter, [key(1)]) == [False]
    assert adapter.report_status()["failures"] == {"load: wrong_size": 1}
    stored(adapter, [key(1)], [item(b"x" * 4096)])
    assert found(adapter, [key(1)]) == [True]


def test_a_listener_that_fails_costs_no_answer(make: Callable[..., Any]) -> None:
    adapter = make()
    adapter.broken = True
    assert stored(adapter, [key(1)], [item(b"x" * 4096)]) == 4096
    adapter.broken = False
    assert loaded(adapter, [key(1)], [item(bytes(4096))]) == [True]
    assert adapter.report_status()["is_healthy"]


def test_tasks_after_the_store_is_gone_are_answered(make: Callable[..., Any]) -> None:
    adapter = make()
    adapter._store.close()
    assert stored(adapter, [key(1)], [item(b"x" * 4096)]) == -1
    assert loaded(adapter, [key(1)], [item(b"x" * 4096)]) == [False]
    assert found(adapter, [key(1)]) == [False]


def test_a_prompt_of_half_the_first_level_may_wait_to_be_stored(make: Callable[..., Any]) -> None:
    make()
    with_queue = sys.modules["rewarm.connectors.lmcache.adapter"]._with_queue
    large, small = SimpleNamespace(size=64 << 30), SimpleNamespace(size=2 << 30)
    assert with_queue("/kv", large) == f"/kv?save_queue={32 << 30}"
    assert with_queue("pool:?drive=/a&drive=/b", large) == f"pool:?drive=/a&drive=/b&save_queue={32 << 30}"
    for url, description in (("/kv", small), ("/kv", None), ("/kv?save_queue=1GiB", large), ("/kv.toml", large)):
        assert with_queue(url, description) == url


class Stuck:
    """A store whose loads never end."""

    def __init__(self) -> None:
        self.transfer = Slow(2)

    def stats(self) -> Any:
        numbers = {"blocks": 0, "used_bytes": 0, "capacity_bytes": 0, "unreleased_bytes": 0}
        return SimpleNamespace(device="stuck", device_refusals=[], notes=[], **numbers)

    def load(self, _blocks: list[bytes], _views: list[memoryview]) -> Slow:
        return self.transfer

    def close(self) -> None:
        self.transfer.release()


def test_a_load_that_is_late_is_answered_after_its_release_and_hides_its_objects(make: Callable[..., Any]) -> None:
    store = Stuck()
    adapter, keys = make(store, deadline="10ms"), [key(1), key(2)]
    task = adapter.submit_load_task(keys, [item(bytes(8)), item(bytes(8))])
    poller = select.poll()
    poller.register(store.transfer.fileno(), select.POLLIN)
    assert poller.poll(WAIT_S * 1000)  # timed out
    assert adapter.query_load_result(task) is None
    store.transfer.release()
    assert signalled(adapter.get_load_event_fd())
    assert adapter.query_load_result(task).bits == [False, False]
    assert adapter.report_status()["failures"] == {"load: timed_out": 2}
    assert set(adapter._hidden) == set(keys)


def test_the_command_says_where_it_must_run() -> None:
    result = CliRunner().invoke(main, ["connect", "lmcache", "/mnt/kv", "--namespace", "n", "--check", "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert answer["l2_adapter"]["class_name"] == "RewarmL2Adapter"
    assert not answer["checks"][0]["ok"]
    assert "LMCache is not installed here" in answer["checks"][0]["what"]
    assert "Run it in LMCache's own environment" in result.stderr
