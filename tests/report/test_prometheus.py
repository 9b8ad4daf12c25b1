"""A real Prometheus scrapes a running benchmark."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

START_S = 30.0
"""A Prometheus on a busy machine answers long before this."""
BLOCKS = 1 + 3 * (1 + 2) * 4
"""One unmeasured block that warms up the code, then three repeats of waves of one and two sessions of four blocks."""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Prometheus:
    """A server that scrapes one target ten times a second."""

    def __init__(self, folder: Path, target: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 100ms}\n"
            f'scrape_configs: [{{job_name: bench, static_configs: [{{targets: ["127.0.0.1:{target}"]}}]}}]\n'
        )
        self.process = subprocess.Popen(
            [
                "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=error",
            ],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        """Until it has tried its target, which nobody serves yet."""
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            try:
                if self.query("up"):
                    return
            except (urllib.error.URLError, ConnectionError):
                pass
            time.sleep(0.1)
        raise AssertionError("Prometheus did not get ready")

    def query(self, text: str) -> list[dict[str, Any]]:
        """The result of an instant query."""
        with urllib.request.urlopen(f"{self.url}/api/v1/query?query={urllib.parse.quote(text)}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return found


@pytest.fixture
def target() -> int:
    return free_port()


@pytest.fixture
def server(tmp_path: Path, target: int) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: no real one scrapes the endpoint (apt: prometheus)")
    found = Prometheus(tmp_path, target)
    try:
        found.wait_ready()
        yield found
    finally:
        found.process.terminate()
        found.process.wait(timeout=30)


@pytest.mark.browser
def test_a_running_benchmark_is_scraped(server: Prometheus, target: int, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    bench = subprocess.run(
        [
            sys.executable, "-m", "rewarm", "bench", "--target", f"slow={tmp_path}", "--emulate", "slow=40MB/s",
            "--tokens", "64", "--block-tokens", "16", "--concurrency", "1,2", "--repeats", "3",
            "--metrics", f"127.0.0.1:{target}", "-o", str(out),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert bench.returncode == 0, bench.stderr
    assert f"metrics at http://127.0.0.1:{target}/metrics" in bench.stderr
    (series,) = server.query('rewarm_hit_blocks_total{store="slow (emulated)"}[5m]')
    seen = [float(value) for _, value in series["values"]]
    assert seen == sorted(seen)
    assert len(set(seen)) > 2, "the counter was seen to move while the benchmark ran"
    assert 0 < seen[-1] <= BLOCKS
    (read,) = server.query('max_over_time(rewarm_read_bytes_total{store="slow (emulated)"}[5m])')
    block = json.loads(out.read_text())["sizes"]["block_bytes_max"]
    assert float(read["value"][1]) / block == pytest.approx(seen[-1], abs=4 * 2), "hits and bytes are of one moment"
    (up,) = server.query("max_over_time(up[5m])")
    assert up["value"][1] == "1"
