"""Every long command says how far it is, how fast it goes and what is left; `--quiet` says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.bench.live.scripted import Scripted
from tests.report.samples import EXAMPLES

import rewarm
from rewarm.cli import exits, main, output
from rewarm.cli.measuring import stages_of
from rewarm.cli.output import Output
from rewarm.cli.progress import Progress, show_progress
from rewarm.plan import make_plan, make_spec, steps_max

Shown = list[tuple[str, float | None, bool, Progress]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """(label, total, whether it is shown, the progress) of every piece of work."""
    found: Shown = []

    def spy(label: str, *, shown: bool = True, **options: Any) -> AbstractContextManager[Progress]:
        context = show_progress(label, shown=shown, **options)
        found.append((label, options.get("total"), shown, context))  # type: ignore[arg-type]  # opened by the verb
        return context

    monkeypatch.setattr(output, "show_progress", spy)
    return found


def bench(folder: Path) -> list[str]:
    return ["bench", "--target", "ram=memory:", "--tokens", "32", "--block-tokens", "16", "--concurrency", "1"]


def check(folder: Path) -> list[str]:
    with rewarm.open(f"file://{folder}/pool?capacity=64MiB", namespace="n") as store:
        store.save([b"k" * 16], [b"x" * 4096]).wait()
    return ["check", f"{folder}/pool"]


def plan(folder: Path) -> list[str]:
    return ["plan", str(EXAMPLES / "published-wave.toml")]


def trace(folder: Path) -> list[str]:
    row = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    (folder / "trace.jsonl").write_text(f"{json.dumps(row)}\n" * 10)
    return ["trace", str(folder / "trace.jsonl")]


@pytest.mark.parametrize("verb", [bench, check, plan, trace])
@pytest.mark.parametrize("quiet", [False, True])
def test_a_long_command_knows_how_much_there_is_to_do(
    shown: Shown, tmp_path: Path, verb: Callable[[Path], list[str]], quiet: bool
) -> None:
    (tmp_path / "pool").mkdir()
    ended = CliRunner().invoke(main, [*verb(tmp_path), *(["--quiet"] if quiet else [])])
    assert ended.exit_code == exits.OK, ended.stderr
    assert shown
    assert [label for label, total, _, _ in shown if not total] == []
    assert {is_shown for _, _, is_shown, _ in shown} == {not quiet}
    assert ended.stderr == "" or not quiet


def test_a_live_run_knows_how_much_there_is_to_do(shown: Shown) -> None:
    with Scripted(cache_tokens=96) as server:
        arguments = ["bench", "--server", f"s={server.url}", "--tokens", "40", "--concurrency", "1", "--repeats", "1"]
        ended = CliRunner().invoke(main, [*arguments, "--output-tokens", "3"])
    assert ended.exit_code == exits.OK, ended.stderr
    assert [(label.rpartition(": ")[2], total) for label, total, _, _ in shown] == [
        ("filling s", 1), ("making it forget (overflow)", 3), ("1 (wave) on s", 1), ("recompute", 1),
    ]  # fmt: skip


def test_stages_of_measuring_verbs_count_bytes(shown: Shown) -> None:
    with stages_of(Output())("filling", 2e9) as progress:
        progress.advance(1e9)
        assert progress.describe(1.0) == "953.7 MiB of 1.9 GiB, 1.00 GB/s, 1.00 s left"


def test_a_plan_takes_no_more_steps_than_it_said() -> None:
    spec = make_spec(
        {
            "model": "Llama-3.1-8B", "engine": {"gpu": "H100"},
            "medium": [{"name": "local", "drive_read": "6GB/s"}],
            "workload": {"shape": "wave", "concurrency": [2, 4], "context_tokens": 4096},
        },
        "here",
    )  # fmt: skip
    steps: list[str] = []
    make_plan(spec, progress=steps.append)
    assert 0.2 * steps_max(spec) < len(steps) <= steps_max(spec)
