"""LMCache's own benchmarks and server, from its own command line, over the plug-in; also after a restart."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lmcache.servers import ENVIRONMENT, Host, adapter, environment

pytestmark = pytest.mark.lmcache

LMCACHE = str(ENVIRONMENT / "bin" / "lmcache")
TIMEOUT_S = 120


def run(version: str, *arguments: str) -> str:
    """Output of one of LMCache's commands, which ends well."""
    result = subprocess.run(
        [LMCACHE, *arguments], env=environment(version), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_the_benchmark_of_second_levels_stores_finds_loads_and_verifies(host: Host, pool: Path) -> None:
    output = run(
        host.version,
        *("bench", "l2", "--l2-adapter", json.dumps(adapter(pool))),
        *("--num-keys", "16", "--in-flight", "2", "--rounds", "2", "--data-size-kb", "250"),
        *("--no-skip-verify", "--lookup-max-hit-rate", "1.0"),
    )
    assert "All 32 keys data verified OK" in output
    for line in ("[Store] Round 3", "[Lookup] Round 3", "[Load] Round 3"):
        assert re.search(rf"{re.escape(line)}: .*=32/32", output), output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class CacheServer:
    """`lmcache server` over a pool."""

    def __init__(self, version: str, pool: Path, log: Path) -> None:
        self.version, self.port, self.http = version, free_port(), free_port()
        command = [LMCACHE, "server", "--port", str(self.port), "--http-port", str(self.http), "--l1-size-gb", "0.1"]
        command += ["--chunk-size", "64", "--eviction-policy", "LRU", "--disable-observability"]
        command += ["--supported-transfer-mode", "auto"]
        command += ["--l2-adapter", json.dumps(adapter(pool))]
        with log.open("w") as file:
            self._process = subprocess.Popen(command, env=environment(version), stdout=file, stderr=subprocess.STDOUT)
        end_s = time.monotonic() + TIMEOUT_S
        while not self.answers():
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end_s, f"the server did not start in time\n{log.read_text()[-4000:]}"
            time.sleep(0.1)

    def answers(self) -> bool:
        try:
            return bool(self.get("healthcheck"))
        except (urllib.error.URLError, ConnectionError):
            return False

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/{path}", timeout=10) as answer:
            return dict(json.loads(answer.read()))

    def adapter(self) -> dict[str, Any]:
        """The status of our plug-in."""
        return dict(self.get("status")["storage_manager"]["l2_adapters"][0])

    def bench(self) -> str:
        """Four requests of LMCache's own benchmark: look-up, store, look-up, retrieve, with checksums."""
        return run(
            self.version,
            *("bench", "server", "--mode", "cpu", "--rpc-url", f"tcp://localhost:{self.port}"),
            *("--url", f"http://localhost:{self.http}", "--start", "0", "--end", "4", "--interval", "0"),
            *("--num-tokens", "512", "--num-blocks", "64", "--kvcache-shape-spec", "(2,64,16,2,64):float16:4"),
        )

    def end(self) -> None:
        """As an operator does."""
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(60) in (0, 130)  # 130: what a shell says of SIGINT

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


def checksums(output: str) -> dict[str, str]:
    """Request -> checksum of what was retrieved."""
    return dict(re.findall(r"\[seq (\d+)/warm\] CHECKSUM: (\w+)", output))


@pytest.fixture
def start_server(host: Host, pool: Path, tmp_path: Path) -> Iterator[Callable[[], CacheServer]]:
    """Starts servers over one pool; what still runs at the end is killed."""
    started: list[CacheServer] = []

    def start() -> CacheServer:
        started.append(CacheServer(host.version, pool, tmp_path / f"server-{len(started)}.log"))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def test_a_server_finds_everything_after_a_restart(start_server: Callable[[], CacheServer]) -> None:
    first = start_server()
    stored = first.bench()
    assert re.search(r"Checksum OK:\s+4\n", stored), stored
    for _ in range(200):
        if first.adapter()["stored_object_count"] == 32:
            break
        time.sleep(0.05)
    first.end()
    second = start_server()
    found = second.bench()
    assert len(checksums(stored)) == 4
    assert checksums(found) == checksums(stored)
    status = second.adapter()
    assert "Cold Store" not in found  # nothing was left to compute
    assert status["stored_object_count"] == 32
    assert status["locked_key_count"] == 0
    assert status["failures"] == {}


def test_connect_prints_flags_that_this_lmcache_takes_and_tries_them(host: Host, pool: Path) -> None:
    rewarm = [str(ENVIRONMENT / "bin" / "rewarm"), "connect", "lmcache", f"{pool}?capacity=64MiB", "--check", "--json"]
    result = subprocess.run(
        [*rewarm, "--namespace", "tests"],
        env=environment(host.version),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    answer = json.loads(result.stdout)
    assert result.returncode == 0, answer["checks"]
    assert answer["version"].startswith(host.version)
    assert [check["part"] for check in answer["checks"]] == ["LMCache", "interface", "namespace", "store and load"]
    words = shlex.split(answer["command"].replace("\\\n", " "))
    assert run(
        host.version, "bench", "l2", *words[words.index("--l2-adapter") :], "--num-keys", "4", "--no-skip-verify"
    )
