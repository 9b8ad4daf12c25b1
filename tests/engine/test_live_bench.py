"""`rewarm bench --server` against two real vLLM servers: with Rewarm, and with vLLM's own file-system tier.

Both are restarted by the hook before the cell, so what they report as cached came from disk. No time is judged here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.engines import ENVIRONMENT, rewarm_kv

from rewarm.bench.result import Result

pytestmark = pytest.mark.engine

TOKENS = 600
BLOCK_TOKENS = 32
START_S = 200.0
RUN_S = 280.0
HOST = Path(__file__).with_name("live_host.py")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def arguments(model: Path, port: int, config: dict[str, Any]) -> list[str]:
    return [
        "--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager", "--seed", "0",
        "--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(config),
    ]  # fmt: skip


@contextlib.contextmanager
def hosted(folder: Path, servers: dict[str, list[str]]) -> Iterator[Callable[[str], str]]:
    """The host of the servers; gives the command that (re)starts one by name."""
    (folder / "servers.json").write_text(json.dumps(servers))
    path = folder / "host.sock"
    python = str(ENVIRONMENT / "bin" / "python")
    # Compiled modules are kept: an import without them takes four times as long.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with (folder / "log").open("w") as log:
        host = subprocess.Popen(
            [python, str(HOST), str(path), str(folder / "servers.json")],
            stdout=log,
            stderr=log,
            env={**inherited, "VLLM_CACHE_ROOT": str(ENVIRONMENT / "cache")},
            start_new_session=True,  # an interruption is for us: the host sees that we are gone, and stops its servers
        )
    try:
        end_s = time.monotonic() + START_S
        while not path.exists():
            assert host.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < end_s, "vLLM was not imported in time"
            time.sleep(0.1)
        yield (
            lambda name: (
                f'{sys.executable} -S -c "import socket; s = socket.socket(socket.AF_UNIX); '
                f"s.connect('{path}'); s.send(b'{name}'); s.recv(9)\""
            )
        )
    finally:
        with socket.socket(socket.AF_UNIX) as last, contextlib.suppress(OSError):
            last.connect(str(path))  # and hang up: the host stops its servers and ends
        host.wait(60)


def test_two_servers_restarted_restore_what_they_had_stored(
    make_model: Callable[..., Path], tmp_path: Path, pool: Path
) -> None:
    model = make_model()
    rewarm = rewarm_kv(pool)
    own = {**rewarm, "kv_connector": "OffloadingConnector"}
    del own["kv_connector_module_path"]
    own["kv_connector_extra_config"] = {
        **rewarm["kv_connector_extra_config"],
        "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "fs")}],
    }
    (tmp_path / "fs").mkdir()
    ports = {"rewarm": free_port(), "fs": free_port()}
    servers = {name: arguments(model, ports[name], config) for name, config in (("rewarm", rewarm), ("fs", own))}
    with hosted(tmp_path, servers) as restart:
        for name in servers:
            subprocess.run(restart(name), shell=True, check=True, timeout=60)
        result = bench(tmp_path / "result.json", ports, restart)
    assert result.failures == []
    assert [cell.target for cell in result.cells] == ["rewarm", "fs"]
    for cell in result.cells:
        for request in cell.requests:
            assert request.live is not None
            assert request.live.prompt_tokens is not None
            assert abs(request.live.prompt_tokens - TOKENS) <= BLOCK_TOKENS
            assert request.live.cached_tokens == (request.live.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert request.live.output_tokens == 4
        assert cell.recompute is not None
        assert cell.recompute.source == "measured"


def bench(out: Path, ports: dict[str, int], restart: Callable[[str], str]) -> Result:
    """Run the verb as a user would, once both servers answer."""
    command = [sys.executable, "-m", "rewarm", "bench", "-o", str(out), "--tokens", str(TOKENS), "--concurrency", "2"]
    command += ["--repeats", "1", "--output-tokens", "4", "--timeout", "100s"]
    for name, port in ports.items():
        wait_until_up(port)
        command += ["--server", f"{name}=http://127.0.0.1:{port}/v1", "--restart", f"{name}={restart(name)}"]
        letters = list(
            range(10, 90)
        )  # a model with random weights would answer with halves of letters, which have no text
        body = json.dumps({"ignore_eos": True, "allowed_token_ids": letters})
        command += ["--api", f"{name}=completions", "--body", f"{name}={body}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return msgspec.json.decode(out.read_bytes(), type=Result)


def wait_until_up(port: int) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server did not come up")
