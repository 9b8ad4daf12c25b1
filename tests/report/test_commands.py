"""`rewarm report` and `rewarm metrics` as people type them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from click.testing import Result as Invocation
from tests.report.reading import read_page
from tests.report.samples import EXAMPLES, bench_result, plan_result

import rewarm
from rewarm.cli import exits, exporter, main
from rewarm.errors import ConfigError


def run(*arguments: str) -> Invocation:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    bench, plan = tmp_path / "result.json", tmp_path / "plan.json"
    bench.write_bytes(msgspec.json.encode(bench_result()))
    plan.write_bytes(msgspec.json.encode(plan_result()))
    return str(bench), str(plan)


@pytest.fixture
def pool(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/pool"
    (tmp_path / "pool").mkdir()
    with rewarm.open(f"{url}?capacity=64MiB", namespace="n") as store:
        assert store.save([b"k" * 16], [b"x" * 4096]).wait() == [True]
    return url


def test_results_and_plans_become_one_page(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    shown = run("report", *files, "-o", str(out))
    assert shown.exit_code == exits.OK, shown.stderr
    assert re.fullmatch(r"wrote \S+ \(1\.\d MiB\): open it in a browser\n", shown.stdout)
    assert len(read_page(out.read_text()).all("article")) == 2
    answer = json.loads(run("report", files[0], "-o", str(out), "--json").stdout)
    assert answer["page_bytes"] == out.stat().st_size


def test_a_plan_and_a_benchmark_write_their_page(tmp_path: Path) -> None:
    plan, bench = tmp_path / "plan.html", tmp_path / "bench.html"
    shown = run("plan", str(EXAMPLES / "published-wave.toml"), "-o", str(plan))
    assert shown.exit_code == exits.OK, shown.stderr
    shown = run(
        "bench", "--target", "ram=memory:", "--tokens", "32", "--block-tokens", "16", "--concurrency", "1",
        "--report", str(bench),
    )  # fmt: skip
    assert shown.exit_code == exits.OK, shown.stderr
    assert f"report: {bench}, open it in a browser" in shown.stderr
    assert read_page(plan.read_text()).all("h2")[0].text.startswith("What to buy for")
    assert read_page(bench.read_text()).all("h2")[0].text.startswith("Cold recovery of")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["report"], "Missing argument 'RESULTS...'"),
        (["report", "nowhere.json"], "nowhere.json: No such file"),
        (["report", "{bench}", "-o", "{tmp}/none/page.html"], "there is no directory"),
        (["metrics"], "Missing argument 'URL..'"),
        (["metrics", "{tmp}"], "holds no pool"),
        (["metrics", "{pool}", "--listen", "nonsense"], "cannot read 'nonsense' as HOST:PORT"),
        (["metrics", "{pool}", "--listen", "127.0.0.1:99999"], "write for example 127.0.0.1:9808"),
        (["metrics", "{pool}", "--listen", "192.0.2.1:9808"], "cannot listen on 192.0.2.1:9808"),
        (["metrics", "{pool}", "--listen", "9808", "--textfile", "x"], "give --listen or --textfile, not both"),
        (["metrics", "{pool}", "--textfile", "{tmp}/none/x.prom"], "there is no directory"),
    ],
)
def test_mistakes_are_said(files: tuple[str, str], pool: str, tmp_path: Path, arguments: list[str], says: str) -> None:
    shown = run(*(text.format(bench=files[0], tmp=tmp_path, pool=pool) for text in arguments))
    assert shown.exit_code == exits.USAGE
    assert says in shown.stderr


def test_a_pool_is_shown_as_text_json_and_textfile(pool: str, tmp_path: Path) -> None:
    text = run("metrics", pool).stdout
    assert f'rewarm_capacity_bytes{{store="{pool}"}} 6.7108864e+07' in text
    assert f'rewarm_blocks{{store="{pool}"}} 1.0' in text
    assert "hit_blocks" not in text, "a pool does not know the hits of other processes"
    families = {row["name"]: row for row in json.loads(run("metrics", pool, "--json").stdout)}
    assert families["rewarm_blocks"]["samples"] == [{"labels": {"store": pool}, "value": 1}]
    out = tmp_path / "rewarm.prom"
    assert run("metrics", pool, "--textfile", str(out)).stdout == ""
    assert out.read_text().splitlines()[:3] == text.splitlines()[:3]


def test_an_endpoint_serves_until_it_is_interrupted(pool: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "rewarm", "metrics", pool, "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.fullmatch(r"serving (http://127\.0\.0\.1:\d+/metrics); end with Ctrl-C\n", line)
        assert url, line
        with urllib.request.urlopen(url[1], timeout=10) as answer:
            assert "rewarm_pool_up" in answer.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()


def test_a_missing_client_library_is_named(pool: str, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError\n")
    shown = subprocess.run(
        [sys.executable, "-m", "rewarm", "metrics", pool],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == exits.USAGE
    assert "pip install 'rewarm[metrics]'" in shown.stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9808", ("127.0.0.1", 9808)),
        (":9808", ("127.0.0.1", 9808)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert exporter.parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "1.2.3.4:65536", "1.2.3.4:-1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError):
        exporter.parse_address(text)
