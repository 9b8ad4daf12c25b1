"""`rewarm bench` as people type it: mistakes, answers, exit codes, and interruptions that leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from click.testing import Result as Invocation

from rewarm.bench.payload import Payload
from rewarm.bench.result import Result
from rewarm.cli import exits, main

SMALL = ["--tokens", "48", "--block-tokens", "16", "--concurrency", "1,2", "--repeats", "1"]


def bench(*arguments: str) -> Invocation:
    return CliRunner().invoke(main, ["bench", *arguments])


def test_a_run_from_flags_prints_a_table_and_writes_its_result(
    counted: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("out") / "result.json"
    shown = bench(
        "--target", f"disk={counted}", "--target", f"slow=file://{counted}", "--emulate", "slow=100MB/s", *SMALL,
        "--gpu", "L4", "-o", str(out),
    )  # fmt: skip
    assert shown.exit_code == exits.OK, shown.stderr
    assert "disk (measured)" in shown.stdout
    assert "slow (emulated)" in shown.stdout
    assert "recompute (modelled): 1 x L4" in shown.stdout
    result = msgspec.json.decode(out.read_bytes(), type=Result)
    assert [cell.emulated for cell in result.cells] == [False, True, False, True]
    assert list(counted.iterdir()) == []


def test_json_is_the_result_and_nothing_else(tmp_path: Path) -> None:
    shown = bench("--target", "ram=memory:", *SMALL, "--json")
    assert shown.exit_code == exits.OK, shown.stderr
    assert json.loads(shown.stdout)["job"]["targets"]["ram"]["url"] == "memory:"


def test_a_job_file_is_run_and_flags_replace_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'model = "Llama-3.1-8B"\ntokens = 4096\nblock_tokens = 16\nconcurrency = [4]\ntargets.ram = "memory:"\n'
    )
    shown = bench(str(path), "--tokens", "32", "--concurrency", "1", "--repeats", "1", "--json", "-q")
    assert shown.exit_code == exits.OK, shown.stderr
    job = json.loads(shown.stdout)["job"]
    assert (job["tokens"], job["concurrency"], job["block_tokens"]) == (32, [1], 16)


def test_wrong_bytes_end_with_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Payload, "matches", lambda self, number, data: False)
    shown = bench("--target", "ram=memory:", *SMALL, "--json")
    assert shown.exit_code == exits.FINDINGS
    assert "blocks came back with other bytes than were stored" in shown.stderr
    assert json.loads(shown.stdout)["cells"][0]["ttft_s"]["p50"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], exits.USAGE, "nothing to measure; give a job file, or --target NAME=URL"),
        (["--target", "memory:"], exits.USAGE, "write NAME=URL, for example"),
        (["--target", "a=memory:", "--target", "a=memory:"], exits.USAGE, "'a' is given twice"),
        (["--target", "a=memory:", "--emulate", "b=1GB/s"], exits.USAGE, "no target 'b'; one of a"),
        (["--target", "a=memory:", "--emulate", "a=1GB"], exits.USAGE, ""),
        (["--target", "a=memory:", "--emulate", "a=9MB/s"], exits.USAGE, "must be at least 10.00 MB/s"),
        (["--target", "a=memory:", "--concurrency", "8;16"], exits.USAGE, "cannot read '8;16'"),
        (["--target", "a=memory:", "--model", "Lama-3.1-8B"], exits.USAGE, "did you mean 'Llama-3.1-8B'"),
        (["--target", "a=memory:", "--tokens", "0"], exits.USAGE, "'tokens'"),
        (["--target", "a=memory:", "--gpu", "H101", *SMALL], exits.USAGE, "did you mean 'H100'"),
        (["--target", "a=memory:", "--tokns", "1"], exits.USAGE, "Did you mean"),
        (["--target", "a=memory:", "-o", "/no/folder/r.json"], exits.USAGE, "there is no directory /no/folder"),
        (["--target", "a=/no/such/folder"], exits.USAGE, "no such directory: /no/such/folder"),
        (["missing.toml"], exits.USAGE, "cannot read the job missing.toml"),
    ],
)  # fmt: skip
def test_mistakes_are_named(arguments: list[str], code: int, message: str) -> None:
    shown = bench(*arguments)
    assert shown.exit_code == code, shown.stderr
    assert message.lower() in shown.stderr.lower()
    assert "Traceback" not in shown.stderr


@pytest.fixture
def _nobody() -> Iterator[None]:
    """Root's rights are given up for the test, where it has them."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@pytest.mark.usefixtures("_nobody")
def test_no_permission_is_a_medium_that_failed() -> None:
    shown = bench("--target", "a=/", *SMALL)
    assert shown.exit_code == exits.MEDIUM, shown.stderr
    assert "cannot write in /: Permission denied" in shown.stderr


def start(*arguments: str) -> subprocess.Popen[str]:
    """A run that will be interrupted; SIGINT means the same to it as to a program in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "rewarm", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read progress until it says `text`."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the run ended without saying {text!r}")


@pytest.mark.crash
def test_an_interrupted_wave_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    process = start(
        "--target", f"slow={tmp_path}", "--emulate", "slow=10MB/s", "--tokens", "240", "--block-tokens", "16",
        "--concurrency", "2", "--repeats", "1",
    )  # fmt: skip
    wait_for(process, "2 restores from slow (emulated)")
    assert len(list(tmp_path.iterdir())) == 2
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == exits.INTERRUPTED, stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert f"removed {tmp_path}" in stderr
    assert "error: interrupted" in stderr
    assert stdout == ""


@pytest.mark.crash
def test_a_termination_while_filling_leaves_nothing_behind(tmp_path: Path) -> None:
    process = start(
        "--target", f"disk={tmp_path}", "--tokens", "512", "--block-tokens", "16", "--concurrency", "4", "--quiet"
    )
    while not list(tmp_path.glob("*/pool/writers/*/*.seg")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == exits.INTERRUPTED, stderr
    assert list(tmp_path.iterdir()) == []
