"""The plug-in below LMCache's own StorageManager: its controllers, its first level, its locks. Both versions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lmcache.servers import OBJECT_BYTES, Host, Server, ServerError

pytestmark = pytest.mark.lmcache


def whole(server: Server, seed: int, count: int, **kind: object) -> bool:
    """Whether every object is loaded from the store, and right."""
    everything = list(range(count))
    answer = server.ask("load", seed=seed, count=count, **kind)
    return answer == {"hits": everything, "right": everything, "from_l2": count}


def assert_nothing_is_held(server: Server) -> None:
    """No lock, no reserved memory, nothing that the kernel has."""
    status = server.ask("status")
    assert status["healthy"]
    assert status["adapter"]["locked_key_count"] == 0
    assert status["adapter"]["unreleased_bytes"] == 0
    assert status["l1"]["write_locked_count"] == status["l1"]["read_locked_count"] == 0


def test_what_is_stored_comes_back_in_the_same_server_and_in_the_next(host: Host, pool: Path) -> None:
    first = host.server(pool)
    assert first.ask("store", seed=1, count=20) == {"written": 20}
    assert whole(first, 1, 20)
    assert first.ask("load", seed=1, count=24)["hits"] == list(range(20))
    assert_nothing_is_held(first)
    first.end()
    second = host.server(pool)
    assert whole(second, 1, 20)
    assert second.ask("status")["adapter"]["registered_bytes"] > 0
    assert_nothing_is_held(second)
    second.end()


def test_a_second_server_on_the_same_directory_hits_everything(host: Host, pool: Path) -> None:
    writer, reader = host.server(pool), host.server(pool)
    writer.ask("store", seed=1, count=20)
    assert whole(host.server(pool), 1, 20)  # opened afterwards: reads what is there
    assert any(whole(reader, 1, 20) for _ in asking())  # opened before: sees it within a poll


def asking() -> Iterator[None]:
    """Asks again until the store has polled many times over: it measures and reads what others wrote at each poll."""
    end_s = time.monotonic() + 20.0
    while time.monotonic() < end_s:
        yield
        time.sleep(0.05)


def test_objects_of_another_type_are_other_objects(host: Host, pool: Path) -> None:
    server = host.server(pool)
    server.ask("store", seed=1, count=4)
    assert whole(server, 1, 4)
    assert server.ask("load", seed=1, count=4, dtype="float16")["hits"] == []
    assert server.ask("load", seed=1, count=4, tokens=32)["hits"] == []
    server.ask("store", seed=1, count=4, dtype="float16")
    assert whole(server, 1, 4, dtype="float16")
    assert whole(server, 1, 4)


def test_models_salts_and_namespaces_are_apart(host: Host, pool: Path) -> None:
    server = host.server(pool)
    server.ask("store", seed=1, count=4)
    assert server.ask("load", seed=1, count=4, salt="tenant")["hits"] == []
    assert server.ask("load", seed=1, count=4, model="n")["hits"] == []
    assert host.server(pool, namespace="other").ask("load", seed=1, count=4)["hits"] == []
    assert host.server(pool, engine="vllm 0.33").ask("load", seed=1, count=4)["hits"] == []


def test_a_start_says_what_is_missing(host: Host, pool: Path) -> None:
    with pytest.raises(ServerError, match="which weights and which engine"):
        host.server(pool, namespace="")
    with pytest.raises(ServerError, match="did you mean 'namespace'"):
        host.server(pool, namespce="tests")
    with pytest.raises(ServerError, match="does not exist"):
        host.server(pool / "missing")


def test_deletes_usage_and_listings_are_reported(host: Host, pool: Path) -> None:
    server = host.server(pool)
    server.ask("store", seed=1, count=5)
    server.ask("store", seed=2, count=3, salt="tenant")
    status = server.ask("status")
    assert status["salts"] == {"": 5 * OBJECT_BYTES, "tenant": 3 * OBJECT_BYTES}
    assert any(server.ask("status")["used_bytes"] >= 8 * OBJECT_BYTES for _ in asking())
    listed = server.ask("keys", page_size=3)
    assert listed["pages"] == 3
    assert len({name for name, _ in listed["keys"]}) == 8
    assert {size for _, size in listed["keys"]} == {OBJECT_BYTES}
    server.ask("delete", seed=1, count=2)
    assert server.ask("load", seed=1, count=5)["hits"] == [2, 3, 4]
    assert server.ask("status")["salts"][""] == 3 * OBJECT_BYTES
    assert len(server.ask("keys", page_size=100)["keys"]) == 6
    server.ask("load", seed=9, count=1)  # empties the first level, so that the next store reaches the second
    server.ask("store", seed=1, count=5)
    assert whole(server, 1, 5)
    server.end()
    again = host.server(pool)
    assert again.ask("keys", page_size=100)["keys"] == []
    assert whole(again, 1, 5)
    assert len(again.ask("keys", page_size=100)["keys"]) == 5
    assert again.ask("status")["salts"] == {"": 5 * OBJECT_BYTES}


def test_several_drives_serve_one_server(host: Host, tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("a", "b")]
    for drive in drives:
        drive.mkdir()
    url = f"pool:?drive={drives[0]}&drive={drives[1]}&capacity=256MiB"
    first = host.server(url)
    first.ask("store", seed=1, count=40)
    assert whole(first, 1, 40)
    first.end()
    assert all(any(drive.glob("writers/*/*.seg")) for drive in drives)
    assert whole(host.server(url), 1, 40)


def test_memory_tags_are_those_of_storage(hosts: dict[str, Host], pool: Path) -> None:
    assert hosts["0.5.7"].server(pool).ask("tags") == {"tags": ["storage", "local"]}


def test_a_pool_at_its_capacity_evicts_and_says_so(host: Host, pool: Path) -> None:
    server = host.server(f"file://{pool}?capacity=32MiB")
    for seed in range(1, 5):
        server.ask("load", seed=9, count=1)  # empties the first level
        assert server.ask("store", seed=seed, count=100) == {"written": 100}  # 12.5 MiB
    found = 0
    for seed in range(1, 5):
        answer = server.ask("load", seed=seed, count=100)
        assert answer["hits"] == answer["right"]
        found += len(answer["hits"])
    assert 0 < found < 400
    assert_nothing_is_held(server)
    assert server.ask("status")["salts"] == {"": found * OBJECT_BYTES}  # what was evicted counts no more
