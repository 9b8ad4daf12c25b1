"""Greedy answers with and without Rewarm are the same, and a second process computes what was not kept only."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.remote import Remote
from tests.transformers.conftest import ENVIRONMENT, prompt

pytestmark = pytest.mark.transformers


def test_importing_the_connector_imports_no_engine(worker: Remote) -> None:
    assert worker.ask("eager") == []


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "mistral", "deepseek_v3"])
def test_a_second_process_restores_what_the_first_kept(worker: Remote, second: Remote, url: str, kind: str) -> None:
    context = [prompt(1)]
    for process in (worker, second):
        process.ask("make", name="m", kind=kind)
    right = worker.ask("plain", name="m", ids=context)
    assert len(set(right[0][333:])) > 6, "a model that always says the same proves nothing"
    worker.ask("open", cache="c", name="m", url=url)
    assert worker.ask("generate", cache="c", ids=context) == {"tokens": right, "restored": 0}
    assert worker.ask("stats", cache="c")["lost"] == {}
    worker.ask("close", cache="c")
    second.ask("open", cache="c", name="m", url=url)
    assert second.ask("generate", cache="c", ids=context) == {"tokens": right, "restored": 320}
    # The next turn begins with the answer, which was kept too.
    turn = [right[0] + prompt(2, 50)]
    expected = second.ask("plain", name="m", ids=turn)
    assert second.ask("generate", cache="c", ids=turn) == {"tokens": expected, "restored": 320}
    # A prefix that was kept as part of a longer one: the longest run of whole blocks.
    fork = [context[0][:200] + prompt(3, 90)]
    expected = second.ask("plain", name="m", ids=fork)
    assert second.ask("generate", cache="c", ids=fork) == {"tokens": expected, "restored": 192}
    second.ask("close", cache="c")


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_batch_with_padding(worker: Remote, url: str, kind: str) -> None:
    worker.ask("make", name="m", kind=kind)
    worker.ask("open", cache="c", name="m", url=url)
    long, short = prompt(4, 300), prompt(5, 120)
    for context in (long, short):
        worker.ask("generate", cache="c", ids=[context])
    ids = [long, [0] * 180 + short]
    mask = [[1] * 300, [0] * 180 + [1] * 120]
    right = worker.ask("plain", name="m", ids=ids, mask=mask)
    answer = worker.ask("generate", cache="c", ids=ids, mask=mask)
    assert answer["tokens"] == right
    # 96 tokens of the short one are held, so both rows are restored up to column 276.
    assert answer["restored"] == 276 + 96
    # What the batch computed was kept row by row, without its padding.
    longer = [short + right[1][300:308] + prompt(6, 40)]
    answer = worker.ask("generate", cache="c", ids=longer)
    assert answer["tokens"] == worker.ask("plain", name="m", ids=longer)
    assert answer["restored"] == 128
    worker.ask("close", cache="c")


def test_a_whole_number_of_blocks_leaves_one_token_to_compute(worker: Remote, url: str) -> None:
    worker.ask("make", name="m", kind="qwen3")
    worker.ask("open", cache="c", name="m", url=url)
    context = [prompt(7, 320)]
    right = worker.ask("generate", cache="c", ids=context)["tokens"]
    assert worker.ask("stats", cache="c")["kept"] == 10
    assert worker.ask("generate", cache="c", ids=context) == {"tokens": right, "restored": 319}
    worker.ask("close", cache="c")


def test_a_window_is_restored_without_what_it_no_longer_sees(worker: Remote, second: Remote, url: str) -> None:
    for process in (worker, second):
        process.ask("make", name="m", kind="gemma2")
    worker.ask("open", cache="c", name="m", url=url)
    context = [prompt(8)]
    worker.ask("generate", cache="c", ids=context)
    assert worker.ask("stats", cache="c")["kept"] == 20, "ten blocks of full layers, ten of layers with a window"
    worker.ask("close", cache="c")
    second.ask("open", cache="c", name="m", url=url)
    assert second.ask("generate", cache="c", ids=context)["restored"] == 320
    assert second.ask("stats", cache="c")["hits"] == 10 + 2, "39 tokens of the window are in two blocks"
    second.ask("close", cache="c")


def test_the_two_halves_around_a_pass_of_ones_own(worker: Remote, url: str) -> None:
    worker.ask("make", name="m", kind="llama")
    worker.ask("open", cache="c", name="m", url=url)
    assert worker.ask("halves", cache="c", ids=[prompt(9, 100)]) == [0, 3]
    assert worker.ask("stats", cache="c")["kept"] == 3
    assert worker.ask("halves", cache="c", ids=[prompt(9, 100)]) == [96, 0]
    worker.ask("close", cache="c")


def test_several_drives(worker: Remote, tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("a", "b")]
    for drive in drives:
        drive.mkdir()
    url = f"pool:?drive={drives[0]}&drive={drives[1]}&capacity=256MiB"
    worker.ask("make", name="m", kind="qwen3")
    for restored in (0, 320):
        worker.ask("open", cache="c", name="m", url=url)
        assert worker.ask("generate", cache="c", ids=[prompt(10)])["restored"] == restored
        worker.ask("close", cache="c")


def test_the_command_tries_all_of_it(worker: Remote, url: str, tmp_path: Path) -> None:
    assert worker.ask("eager") == []
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid" / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    command = [ENVIRONMENT / "bin" / "python", "-m", "rewarm", "connect", "transformers", url]
    tried = subprocess.run(
        [*command, "--model", tmp_path / "hybrid", "--check", "--json"], capture_output=True, check=False
    )
    checks = {check["part"]: check for check in json.loads(tried.stdout)["checks"]}
    assert {part: check["ok"] for part, check in checks.items()} == {
        "engine": True,
        "round trip": True,
        "directory": True,
        "pool": True,
        "model": False,
    }
    assert "LinearAttentionLayer" in checks["model"]["what"]
    assert tried.returncode == 1
