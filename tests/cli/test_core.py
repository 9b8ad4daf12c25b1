"""The command line apart from its verbs: help, unknown words, exit codes, JSON, progress, result files."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path, PurePosixPath

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import rewarm
from rewarm.cli import exits, main, progress
from rewarm.cli.group import VERBS
from rewarm.cli.output import Output, output_options, to_json, write_file
from rewarm.cli.parameters import DURATION, RATE, SIZE, as_url
from rewarm.errors import ConfigError, MisuseError, NamespaceMismatch, StorageError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="rewarm")


def fake_verb(monkeypatch: pytest.MonkeyPatch, command: click.Command) -> None:
    """Put a command in the place of the verb `check`."""
    monkeypatch.setattr(importlib.import_module("rewarm.cli.check_command"), "command", command)


def test_help_and_version_import_no_verb_and_no_heavy_package() -> None:
    script = """
        import sys
        from rewarm.cli import main
        for arguments in (["--help"], ["--version"]):
            main(arguments, prog_name="rewarm", standalone_mode=False)
        heavy = [m for m in sys.modules if m in ("numpy", "msgspec", "xxhash") or m.endswith("_command")]
        sys.exit(repr(heavy) if heavy else 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in VERBS)
    assert f"rewarm {rewarm.__version__}" in done.stdout


def test_python_dash_m_is_the_command() -> None:
    command = [sys.executable, "-m", "rewarm", "--version"]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"rewarm {rewarm.__version__}\n"
    )


def leaves(verb: str) -> list[list[str]]:
    """The command lines of a verb: itself, or those of its parts."""
    command = main.get_command(click.Context(main), verb)
    return [[verb, part] for part in command.commands] if isinstance(command, click.Group) else [[verb]]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_json_and_quiet(verb: str) -> None:
    for words in leaves(verb):
        result = run(*words, "--help")
        assert result.exit_code == 0
        assert "--json" in result.stdout
        assert "--quiet" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Commands:"),
        (["inspct", "/x"], "did you mean 'inspect'?"),
        (["xyzzy"], "one of "),
        (["--versoin"], "--version"),
        (["check", "--fixx", "/x"], "--fix"),
        (["check"], "Missing argument"),
        (["evict", "/x", "--to", "2tib"], "did you mean 'TiB'?"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_names_what_is_near(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == exits.USAGE
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("bad [red]url[/red]"), 2, "error: bad [red]url[/red]\n"),
        (NamespaceMismatch("two"), 2, "error: two\n"),
        (MisuseError("closed"), 2, "error: closed\n"),
        (StorageError("x" * 300), 3, f"error: {'x' * 300}\n"),
        (PermissionError(13, "Permission denied", "/mnt/kv"), 3, "error: /mnt/kv: Permission denied\n"),
        (OSError(28, "No space left on device"), 3, "error: No space left on device\n"),
        (
            FileNotFoundError(2, "No such file or directory", "job.toml"),
            2,
            "error: job.toml: No such file or directory\n",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (click.exceptions.Exit(exits.FINDINGS), 1, ""),
    ],
)
def test_an_error_is_one_plain_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    @click.command()
    @output_options
    def command(output: Output) -> None:
        raise error

    fake_verb(monkeypatch, command)
    result = run("check")
    assert (result.exit_code, result.stderr, result.stdout) == (code, line, "")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        raise ZeroDivisionError

    fake_verb(monkeypatch, command)
    assert isinstance(run("check").exception, ZeroDivisionError)


INTERRUPTED = """
    import click, importlib, sys, time
    from rewarm.cli import main
    from rewarm.cli.output import Output, output_options

    @click.command()
    @output_options
    def command(output):
        with output.progress("waiting"):
            print("ready", flush=True)
            time.sleep(60)

    importlib.import_module("rewarm.cli.check_command").command = command
    main(["check"], prog_name="rewarm")
"""


def test_ctrl_c_is_one_line_and_130() -> None:
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in background jobs
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "error: interrupted\n")


def on_a_terminal(script: str, **environment: str) -> bytes:
    """What a script writes to stderr when stderr is a terminal."""
    leader, follower = os.openpty()
    settings = {"PATH": os.environ["PATH"], "TERM": "xterm", **environment}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stderr=follower, stdout=subprocess.DEVNULL, env=settings) as process:
        os.close(follower)
        written = b""
        try:
            while chunk := os.read(leader, 65536):
                written += chunk
        except OSError:  # EIO: the last process on the terminal has gone
            pass
        finally:
            os.close(leader)
    assert process.returncode == 0, written
    return written


ERROR_LINE = "from rewarm.cli.exits import show_error; show_error('broken')"


def test_colour_is_for_terminals_and_no_color_is_honoured() -> None:
    assert b"\x1b[" in on_a_terminal(ERROR_LINE)
    assert on_a_terminal(ERROR_LINE, NO_COLOR="1").count(b"\x1b[3") == 0
    assert b"broken" in on_a_terminal(ERROR_LINE, NO_COLOR="1")


BAR = """
    import itertools, threading
    from rewarm.cli.progress import show_progress
    counts, shown = itertools.count(50, 50), threading.Event()
    def poll():
        count = next(counts)
        if count > 100:  # two counts are on the terminal by now
            shown.set()
        return count
    with show_progress("checking", total=1000, unit="blocks", poll=poll):
        shown.wait(30)
"""


def test_a_terminal_gets_a_bar_with_counts_rate_and_time_left() -> None:
    written = on_a_terminal(BAR).decode()
    assert "checking" in written
    assert "of 1,000 blocks" in written
    assert "blocks/s" in written
    assert "left" in written


def test_short_work_prints_nothing_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.show_progress("checking", total=10) as shown:
        shown.advance(10)
    assert capfd.readouterr().err == ""


def test_longer_work_prints_plain_lines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "_TICK_S", 0.001)
    written = ""
    with progress.show_progress("checking [1]", total=8 << 20, unit="B", poll=lambda: 4 << 20):
        while "\n" not in written:
            written += capfd.readouterr().err
    assert written.startswith("checking [1]: 4.0 MiB of 8.0 MiB, ")
    assert written.rstrip().endswith("left")
    assert written.count("\n") == 1  # the next one comes after LINE_EVERY_S


def test_quiet_shows_no_progress_and_no_notes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "show_progress", None)
    quiet = Output(quiet=True)
    quiet.note("something")
    with quiet.progress("checking") as shown:
        shown.advance()
    assert capfd.readouterr().err == ""
    Output().note("something [x]")
    assert capfd.readouterr().err == "something [x]\n"


def test_progress_survives_a_store_that_closes() -> None:
    def poll() -> float:
        raise MisuseError("closed")

    shown = progress.Progress("checking", None, "B", poll)
    shown.advance(3)
    shown.poll()
    shown.poll()
    assert shown.done == 3
    assert shown.describe(1.0) == "3 B, 3 B/s"


def test_json_is_plain_and_indented() -> None:
    value = {
        "path": PurePosixPath("/mnt"),
        "rate": np.float64(1.5),
        "mask": np.array([True, False]),
        "count": np.int64(3),
    }
    assert json.loads(to_json(value)) == {"path": "/mnt", "rate": 1.5, "mask": [True, False], "count": 3}
    assert to_json({"a": 1}) == '{\n  "a": 1\n}'
    with pytest.raises(NotImplementedError):
        to_json(io.BytesIO())


def test_a_result_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    write_file(target, "one")
    write_file(target, b"two")
    assert target.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(ConfigError, match="there is no directory"):
        write_file(tmp_path / "missing" / "result.json", "x")
    with pytest.raises(OSError, match="cannot write"):
        write_file("/dev/full", "x")
    assert Path("/dev/full").is_char_device()
    write_file("/dev/null", "x")
    assert Path("/dev/null").is_char_device()


def test_a_link_to_a_result_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "x"


def test_paths_become_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_url("memory:") == "memory:"
    assert as_url("file:///mnt?capacity=1GB") == "file:///mnt?capacity=1GB"
    assert as_url("/mnt/kv?capacity=1GB") == "file:///mnt/kv?capacity=1GB"
    assert as_url("kv") == f"file://{tmp_path}/kv"
    assert as_url("/mnt/a b#c%") == "file:///mnt/a%20b%23c%25"


def test_parameters_read_units() -> None:
    assert SIZE.convert("2KiB", None, None) == 2048
    assert RATE.convert("8Gb/s", None, None) == 1e9
    assert DURATION.convert("50ms", None, None) == 0.05
    with pytest.raises(click.UsageError, match="unknown unit"):
        DURATION.convert("5 parsecs", None, None)


def test_completion_lists_verbs() -> None:
    settings = {**os.environ, "_REWARM_COMPLETE": "bash_complete", "COMP_WORDS": "rewarm in", "COMP_CWORD": "1"}
    script = "import sys; from rewarm.cli import main; main(prog_name='rewarm')"
    done = subprocess.run([sys.executable, "-c", script], env=settings, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "plain,inspect"
