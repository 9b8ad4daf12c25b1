"""The directory of a run: gone with the run, found again after a kill, and nothing else is touched."""

from __future__ import annotations

import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rewarm.bench.scratch import PREFIX, Scratch, bytes_under, sweep
from rewarm.errors import ConfigError, StorageError

HOLD = """
import sys
from pathlib import Path
from rewarm.bench.scratch import Scratch
with Scratch(Path(sys.argv[1]), lambda text: None) as scratch:
    (scratch.path / "data").write_bytes(bytes(100_000))
    print(scratch.path, flush=True)
    sys.stdin.read()
"""


def start_run(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that holds a scratch directory until its stdin closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_goes_away_and_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    with Scratch(tmp_path, told.append) as scratch:
        (scratch.path / "deep").mkdir()
        (scratch.path / "deep" / "file").write_bytes(bytes(1 << 20))
        assert scratch.path.parent == tmp_path
        assert bytes_under(scratch.path) >= 1 << 20
    assert list(tmp_path.iterdir()) == []
    assert told == [f"removed {scratch.path} (1.0 MiB)"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_it_goes_away_whatever_ended_the_run(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Scratch(tmp_path, lambda text: None):
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["bytes_under", "shutil.rmtree", "format_size"])
def test_the_first_interruption_may_come_while_it_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, calls = pkgutil.resolve_name(f"rewarm.bench.scratch.{step}"), []

    def interrupted(*args: object, **options: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args, **options)

    said: list[str] = []
    scratch = Scratch(tmp_path, said.append)
    with scratch:
        (scratch.path / "data").write_bytes(bytes(10))
        monkeypatch.setattr(f"rewarm.bench.scratch.{step}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scratch.remove()
    assert list(tmp_path.iterdir()) == []
    assert len(said) == 1
    assert said[0].startswith(f"removed {scratch.path}")


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    process, left = start_run(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (left / "data").exists()
    told: list[str] = []
    with Scratch(tmp_path, told.append):
        assert not left.exists()
    assert told[0] == f"removed {left}, left behind by a run that was killed"


def test_a_run_that_is_going_on_is_left_alone(tmp_path: Path) -> None:
    process, held = start_run(tmp_path)
    assert sweep(tmp_path) == []
    assert (held / "data").exists()
    process.communicate("")
    assert not held.exists()


def test_files_beside_it_and_directories_without_a_lock_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / f"{PREFIX}mine").mkdir()
    with Scratch(tmp_path, lambda text: None):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", f"{PREFIX}mine"]


def test_a_missing_directory_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"), Scratch(tmp_path / "missing", lambda text: None):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_a_storage_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot write in"), Scratch(tmp_path, lambda text: None):
        pass
    tmp_path.chmod(0o700)
