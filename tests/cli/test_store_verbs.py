"""The verbs that look after a pool, on real directories: what they do, and what they say when they cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import rewarm
from rewarm.cli import exits, main
from rewarm.store.contract import Outcome

VERBS = (
    ["inspect"],
    ["check"],
    ["check", "--fix"],
    ["evict", "--to", "50%"],
    ["erase", "--namespace", "base", "--yes"],
)
NOBODY = 65534
BLOCK_BYTES = 256 << 10


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="rewarm")


def answer(*arguments: str, code: int = exits.OK) -> Any:
    """The JSON that a verb prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.stderr
    return json.loads(result.stdout)


def keys_of(namespace: str, count: int) -> list[bytes]:
    return [f"{namespace}-{number:08d}".encode() for number in range(count)]


def fill(root: Path, namespace: str = "base", count: int = 32) -> None:
    """A pool with blocks of one namespace, whose writer has ended."""
    blocks = np.random.default_rng(count).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8)
    with rewarm.open(f"file://{root}?capacity=64MiB", namespace=namespace) as store:
        assert all(store.save(keys_of(namespace, count), blocks).wait())


def held(root: Path, namespace: str, count: int = 32) -> int:
    """How many blocks of a namespace a new handle restores whole."""
    with rewarm.open(f"file://{root}", namespace=namespace) as store:
        buffers = np.empty((count, BLOCK_BYTES), np.uint8)
        transfer = store.load(keys_of(namespace, count), buffers)
        transfer.wait()
        return transfer.outcomes.count(Outcome.HIT)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    root.mkdir()
    fill(root)
    return root


def tree(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
class TestEveryVerb:
    """What goes wrong is one line that says what, where and what to do, and an exit code."""

    def refuses(self, verb: list[str], url: str, code: int, *says: str) -> None:
        result = run(*verb, url)
        assert result.exit_code == code, result.stderr
        assert all(text in result.stderr for text in says), result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: ")
        assert result.stdout == ""

    def test_a_missing_directory(self, verb: list[str], tmp_path: Path) -> None:
        self.refuses(verb, str(tmp_path / "missing"), exits.USAGE, "does not exist", str(tmp_path / "missing"))

    def test_a_file_in_place_of_a_directory(self, verb: list[str], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        self.refuses(verb, str(tmp_path / "file"), exits.USAGE, "not a directory")

    def test_a_directory_without_a_pool(self, verb: list[str], tmp_path: Path) -> None:
        self.refuses(verb, f"{tmp_path}?capacity=1GiB", exits.USAGE, "holds no pool")
        assert tree(tmp_path) == set()

    def test_an_unknown_scheme(self, verb: list[str], pool: Path) -> None:
        self.refuses(verb, f"fiel://{pool}", exits.USAGE, "did you mean 'file'?")

    def test_a_host_in_the_url(self, verb: list[str], pool: Path) -> None:
        self.refuses(verb, "file://mnt/kv", exits.USAGE, "three slashes")

    def test_a_store_in_memory(self, verb: list[str], pool: Path) -> None:
        self.refuses(verb, "memory:", exits.USAGE, "no pool on disk")

    def test_an_unknown_option_of_the_url(self, verb: list[str], pool: Path) -> None:
        self.refuses(verb, f"file://{pool}?capcity=64MiB", exits.USAGE, "'capcity'", "did you mean 'capacity'?")

    def test_another_capacity_than_the_pool_was_made_with(self, verb: list[str], pool: Path) -> None:
        self.refuses(verb, f"{pool}?capacity=1GiB", exits.USAGE, "made with capacity=67108864", "1073741824")

    def test_a_foreign_format(self, verb: list[str], pool: Path) -> None:
        facts = json.loads((pool / "pool.json").read_text())
        (pool / "pool.json").write_text(json.dumps({**facts, "format": 99}))
        self.refuses(verb, str(pool), exits.USAGE, "format 99")

    def test_no_permission(self, verb: list[str], pool: Path) -> None:
        pool.chmod(0)
        result = as_nobody(*verb, str(pool)) if os.geteuid() == 0 else run_process(*verb, str(pool))
        pool.chmod(0o700)
        assert result.returncode == exits.MEDIUM, result.stderr
        assert result.stderr.startswith("error: ")
        assert "ermission" in result.stderr
        assert str(pool) in result.stderr
        assert result.stderr.count("\n") == 1


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rewarm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


# Everything is imported while root may read it; then root's rights are given up for good.
AS_NOBODY = """
import importlib, os, sys
import rewarm
from rewarm.cli import main
importlib.import_module(f"rewarm.cli.{sys.argv[1]}_command")
rewarm.open("memory:").close()
os.setgroups([])
os.setresgid({nobody}, {nobody}, {nobody})
os.setresuid({nobody}, {nobody}, {nobody})
main(sys.argv[1:], prog_name="rewarm")
"""


def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a verb without root's rights, as root."""
    command = [sys.executable, "-c", AS_NOBODY.replace("{nobody}", str(NOBODY)), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_full_medium_is_exit_code_3(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=64k none "$1" && (cat /dev/zero > "$1/fill" || true) && exec "$2" -c "$3" "$1"'
    opens = (
        "import sys, importlib, click; from rewarm.cli import main; import rewarm\n"
        "@click.command()\n"
        "@click.argument('url')\n"
        "def command(url): rewarm.open(url)\n"
        "importlib.import_module('rewarm.cli.check_command').command = command\n"
        "main(['check', sys.argv[1] + '?capacity=64MiB'], prog_name='rewarm')"
    )
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us mount nothing, so there is no full medium to try")
    command = [*unshare, "sh", "-c", script, "sh", str(tmp_path), sys.executable, opens]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == exits.MEDIUM, result.stderr
    assert "No space left on device" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_check_finds_nothing_wrong_in_a_sound_pool(pool: Path) -> None:
    before = tree(pool)
    report = answer("check", str(pool))
    assert (report["clean"], report["findings"], report["blocks"]) == (True, [], 32)
    assert report["bytes_verified"] == 32 * BLOCK_BYTES
    result = run("check", str(pool))
    assert "clean: 32 blocks, 8.0 MiB verified" in result.stdout
    assert tree(pool) == before


def damage_a_block(root: Path) -> None:
    """Flip a byte in the middle of the first segment."""
    (segment,) = sorted(root.glob("writers/*/*.seg"))[:1]
    with open(segment, "r+b") as file:
        file.seek(segment.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_check_finds_damage_and_fix_removes_it(pool: Path) -> None:
    damage_a_block(pool)
    report = answer("check", str(pool), code=exits.FINDINGS)
    assert not report["clean"]
    assert [finding["kind"] for finding in report["findings"]] == ["damaged_block"]
    result = run("check", str(pool))
    assert "damaged_block" in result.stdout
    assert "`check --fix` repairs" in result.stdout
    assert answer("check", "--fix", str(pool))["clean"]
    assert answer("check", str(pool))["findings"] == []
    assert held(pool, "base") == 31


def test_evict_drops_down_to_a_share_or_a_size(pool: Path) -> None:
    fill(pool, "tuned")
    used = answer("evict", str(pool), "--to", "100%")
    assert used["freed_bytes"] == 0
    assert used["used_bytes"] > 16 << 20
    half = answer("evict", str(pool), "--to", "12MiB")
    assert half["used_bytes"] <= half["target_bytes"] == 12 << 20
    assert half["freed_bytes"] > 0
    share = answer("evict", str(pool), "--to", "10%")
    assert share["target_bytes"] == int((64 << 20) * 0.1)
    assert share["used_bytes"] <= share["target_bytes"]
    assert answer("check", str(pool))["clean"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("120%", "from 0% to 100%"),
        ("x%", "write for example '80%'"),
        ("nan%", "from 0%"),
        ("2tib", "'TiB'"),
        ("", "'2TiB'"),
    ],
)
def test_evict_refuses_what_is_no_size(pool: Path, target: str, says: str) -> None:
    result = run("evict", str(pool), "--to", target)
    assert result.exit_code == exits.USAGE
    assert says in result.stderr


def test_inspect_shows_what_the_pool_holds_and_changes_nothing(pool: Path) -> None:
    fill(pool, "tuned", 16)
    before = tree(pool)
    shown = answer("inspect", str(pool))
    assert {one["describe"]: one["blocks"] for one in shown["namespaces"]} == {"base": 32, "tuned": 16}
    assert (shown["blocks"], shown["capacity_bytes"], len(shown["writers"])) == (48, 64 << 20, 2)
    assert not any(writer["alive"] for writer in shown["writers"])
    text = run("inspect", str(pool)).stdout
    assert "64.0 MiB" in text
    assert "tuned" in text
    assert all(writer["writer"] in text for writer in shown["writers"])
    assert tree(pool) == before


@pytest.mark.parametrize("verb", [["inspect"], ["check"], ["evict", "--to", "50%"]], ids=" ".join)
def test_a_truncated_pool_file_is_named(verb: list[str], pool: Path) -> None:
    (pool / "pool.json").write_bytes((pool / "pool.json").read_bytes()[:20])
    result = run(*verb, str(pool))
    assert result.exit_code == exits.USAGE
    assert f"{pool}/pool.json is damaged" in result.stderr
    assert "`rewarm check --fix` rebuilds it" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("missing", [True, False])
def test_fix_rebuilds_the_pool_file(pool: Path, missing: bool) -> None:
    made = json.loads((pool / "pool.json").read_text())
    if missing:
        (pool / "pool.json").unlink()
    else:
        (pool / "pool.json").write_bytes(b"{}")
    report = answer("check", "--fix", str(pool))
    assert report["clean"]
    assert ("damaged_pool_file", True) in [(finding["kind"], finding["fixed"]) for finding in report["findings"]]
    again = json.loads((pool / "pool.json").read_text())
    assert (again["pool_id"], again["capacity_bytes"]) == (made["pool_id"], made["capacity_bytes"])
    assert held(pool, "base") == 32


def test_erase_removes_one_namespace_and_leaves_the_others(pool: Path) -> None:
    fill(pool, "tuned", 16)
    erased = answer("erase", str(pool), "--namespace", "tuned", "--yes")
    assert (erased["namespace"], erased["blocks"]) == ("tuned", 16)
    assert erased["freed_bytes"] >= 16 * BLOCK_BYTES
    assert (held(pool, "tuned", 16), held(pool, "base")) == (0, 32)
    assert answer("check", str(pool))["clean"]


def test_erase_takes_the_beginning_of_a_digest(pool: Path) -> None:
    (namespace,) = answer("inspect", str(pool))["namespaces"]
    assert answer("erase", str(pool), "--namespace", namespace["digest"][:8], "--yes")["blocks"] == 32
    assert held(pool, "base") == 0


@pytest.mark.parametrize(
    ("name", "says"), [("bose", "did you mean 'base'?"), ("xyz", "there are: 'base'"), ("0", "no namespace '0'")]
)
def test_erase_refuses_a_namespace_that_is_not_there(pool: Path, name: str, says: str) -> None:
    result = run("erase", str(pool), "--namespace", name, "--yes")
    assert result.exit_code == exits.USAGE
    assert says in result.stderr
    assert held(pool, "base") == 32


def test_erase_asks_first(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["erase", str(pool), "--namespace", "base"]
    unanswered = run(*arguments)
    assert unanswered.exit_code == exits.USAGE
    assert "--yes" in unanswered.stderr
    monkeypatch.setattr("rewarm.cli.erase_command._interactive", lambda: True)
    refused = CliRunner().invoke(main, arguments, input="n\n")
    assert refused.exit_code == 1
    assert "Remove 32 blocks of 'base'" in refused.stderr
    assert held(pool, "base") == 32
    assert CliRunner().invoke(main, arguments, input="y\n").exit_code == exits.OK
    assert held(pool, "base") == 0
