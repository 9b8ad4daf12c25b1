"""SGLang and Transformers without either: what is printed for them, what is checked, and that nothing imports them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rewarm.cli.group import main
from rewarm.connectors.sglang import launch as sglang
from rewarm.connectors.transformers import launch as transformers
from rewarm.errors import ConfigError


def test_no_engine_is_imported_before_it_is_used() -> None:
    """Stand-ins that end the process when they are imported, before whatever is installed here."""
    program = """
import sys
from pathlib import Path
class Trap:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "sglang", "vllm", "lmcache"):
            sys.exit(f"{name} was imported")
sys.meta_path.insert(0, Trap())
import rewarm.cli.connect_command
import rewarm.connectors.lmcache.checks, rewarm.connectors.lmcache.keys, rewarm.connectors.lmcache.waiting
import rewarm.connectors.sglang, rewarm.connectors.sglang.launch, rewarm.connectors.sglang.pages
import rewarm.connectors.transformers, rewarm.connectors.transformers.launch, rewarm.connectors.transformers.prompts
try:
    rewarm.connectors.lmcache.RewarmL2Adapter
except SystemExit as error:
    print(error)
try:
    rewarm.connectors.sglang.RewarmHiCache
except SystemExit as error:
    print(error)
try:
    rewarm.connectors.transformers.PrefixCache
except SystemExit as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("lmcache was imported", "sglang was imported")
    assert third in ("torch was imported", "transformers was imported")


def test_sglangs_command_line_can_be_pasted_into_a_shell() -> None:
    found = sglang.launch("file:///mnt/kv?capacity=2TiB", version="0.5.23", model="my model", tensor_parallel=4)
    words = shlex.split(found.command.replace("\\\n", " "))
    assert words[words.index("--model-path") + 1] == "my model"
    assert words[words.index("--tp-size") + 1] == "4"
    assert json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1]) == found.extra_config
    assert found.extra_config["interface_v1"] == 1
    assert sglang.extra_config("/mnt/kv", namespace="n")["namespace"] == "n"


def test_the_lines_of_python_are_python() -> None:
    found = transformers.snippet("file:///mnt/kv?capacity=2TiB", model='a "b"', namespace="n")
    compile(found.command, "snippet", "exec")
    assert '"file:///mnt/kv?capacity=2TiB"' in found.command
    assert 'namespace="n"' in found.command


def test_what_does_not_last_and_unknown_versions_are_refused() -> None:
    for make in (sglang.launch, transformers.snippet):
        with pytest.raises(ConfigError, match="ends with"):
            make("pool:?drive=memory:&drive=/mnt/a")
    with pytest.raises(ConfigError, match="supported"):
        sglang.launch("file:///mnt/kv", version="0.4.9")


@pytest.mark.parametrize("engine", ["sglang", "transformers"])
def test_checks_say_which_part_fails(tmp_path: Path, engine: str) -> None:
    checked = CliRunner().invoke(main, ["connect", engine, f"{tmp_path}/missing", "--check", "--json"])
    assert checked.exit_code == 1
    parts = {check["part"]: check for check in json.loads(checked.stdout)["checks"]}
    assert "no directory" in parts["directory"]["what"]
    assert "missing" in parts["pool"]["what"]
    checked = CliRunner().invoke(main, ["connect", engine, f"{tmp_path}?capacity=1GiB", "--check", "--json"])
    parts = {check["part"]: check["ok"] for check in json.loads(checked.stdout)["checks"]}
    assert parts["directory"]
    assert parts["pool"]
    assert not (tmp_path / "pool.json").exists(), "a check makes no pool"
