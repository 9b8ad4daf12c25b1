"""What breaks under LMCache becomes a miss: never a hang, a lock that stays, or wrong bytes. Both versions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lmcache.servers import OBJECT_BYTES, Host, Server
from tests.lmcache.test_storage_manager import assert_nothing_is_held, whole

pytestmark = pytest.mark.lmcache


def segments(pool: Path) -> list[Path]:
    return sorted(pool.glob("writers/*/*.seg"))


def stored(host: Host, pool: Path, count: int) -> None:
    """Objects of seed 1, by a server that has ended."""
    server = host.server(pool)
    server.ask("store", seed=1, count=count)
    server.end()


def test_a_truncated_file_is_a_miss_and_is_stored_again(host: Host, pool: Path) -> None:
    stored(host, pool, 20)
    (segment,) = segments(pool)
    os.truncate(segment, segment.stat().st_size // 2)
    server = host.server(pool)
    answer = server.ask("load", seed=1, count=20)
    assert answer["hits"] == answer["right"]
    assert 0 < len(answer["hits"]) < 20
    assert_nothing_is_held(server)
    assert sum(server.ask("status")["adapter"]["failures"].values()) > 0
    server.ask("store", seed=1, count=20)  # what was recomputed
    assert whole(server, 1, 20)


def test_flipped_bytes_are_a_miss(host: Host, pool: Path) -> None:
    stored(host, pool, 8)
    (segment,) = segments(pool)
    with segment.open("r+b") as file:
        file.seek(3 * OBJECT_BYTES + 5000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
    server = host.server(pool)
    answer = server.ask("load", seed=1, count=8)
    assert answer["hits"] == answer["right"]
    assert len(answer["hits"]) == 7
    assert server.ask("load", seed=1, count=8)["hits"] == answer["hits"]  # not offered again
    assert_nothing_is_held(server)


def test_a_directory_that_is_emptied_is_a_miss(host: Host, pool: Path) -> None:
    server = host.server(pool)
    server.ask("store", seed=1, count=8)
    for segment in segments(pool):
        segment.unlink()
    answer = server.ask("load", seed=1, count=8)
    assert answer["hits"] == answer["right"]
    assert_nothing_is_held(server)
    server.ask("store", seed=2, count=8)
    assert server.ask("load", seed=2, count=8, clear=False)["right"] == list(range(8))
    server.end()


def test_a_killed_writer_leaves_only_whole_objects(host: Host, pool: Path) -> None:
    for seed in range(1, 4):
        writer = host.server(pool)
        writer.ask("store", seed=10 * seed, count=4)
        writer.tell("store", seed=seed, count=100)
        writer.kill()
    server = host.server(pool)
    for seed in range(1, 4):
        assert whole(server, 10 * seed, 4)
        answer = server.ask("load", seed=seed, count=100)
        assert answer["hits"] == answer["right"]
    server.ask("store", seed=1, count=100)
    assert whole(server, 1, 100)
    assert_nothing_is_held(server)


@pytest.mark.parametrize("room", [16, 3])
def test_staging_that_is_too_small_cuts_a_load_short(host: Host, pool: Path, room: int) -> None:
    stored(host, pool, 40)
    server = host.server(pool, l1_bytes=room * OBJECT_BYTES)
    for _ in range(3):
        answer = server.ask("load", seed=1, count=40)
        assert answer["hits"] == answer["right"]
        assert len(answer["hits"]) <= room
        assert_nothing_is_held(server)
    assert whole(server, 1, min(room, 3))
    server.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_refuses_and_goes_on(host: Host, small_disk: Path) -> None:
    server = host.server(small_disk)
    for seed in range(1, 4):
        assert server.ask("store", seed=seed, count=60) == {"written": 60}  # 7.5 MiB each
    found = [ask_right(server, seed, 60) for seed in range(1, 4)]
    assert 0 < sum(found) < 180
    assert_nothing_is_held(server)
    server.end()


def ask_right(server: Server, seed: int, count: int) -> int:
    """How many objects are there; all of them are right."""
    answer = server.ask("load", seed=seed, count=count)
    assert answer["hits"] == answer["right"]
    return len(answer["hits"])
