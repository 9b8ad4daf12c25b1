"""Real engines for the tests: each is a process of its own, forked from a host that has imported vLLM (`host.py`)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("REWARM_ENGINE_ENV", ROOT / ".venv-vllm"))
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 120.0
REGION_BYTES = 64 << 20
BLOCK_TOKENS = 32


class EngineError(Exception):
    """What went wrong inside an engine; the text is that of its exception."""


class Host:
    """A process that imports one version of vLLM; it is waited for when the first engine is made."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self._socket = folder / f"host-{version}.sock"
        self._log = folder / f"host-{version}.log"
        self._engines: list[Engine] = []
        overlay = ENVIRONMENT / f"vllm-{version}"
        # Compiled modules are kept: an import without them takes four times as long.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = {**inherited, "VLLM_CACHE_ROOT": str(ENVIRONMENT / "cache")}
        if overlay.is_dir():
            environment["PYTHONPATH"] = str(overlay)
        command = [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).with_name("host.py")), str(self._socket)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def engine(self) -> Engine:
        """A new process, without an engine yet."""
        self._engines.append(Engine(self))
        return self._engines[-1]

    def connect(self) -> socket.socket:
        """A connection to a new child."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while not self._socket.exists():
            assert self._process.poll() is None, self.log_tail()
            assert time.monotonic() < end_s, f"vLLM was not imported in time\n{self.log_tail()}"
            time.sleep(0.05)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(str(self._socket))
        return connection

    def log_tail(self) -> str:
        """The end of what host and engines printed."""
        return self._log.read_text(errors="replace")[-4000:]

    def log_lines(self, word: str) -> list[str]:
        """Lines of the log that hold a word."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if word in line]

    def close(self) -> None:
        """End every engine and the host."""
        for engine in self._engines:
            engine.close()
        self._process.terminate()
        self._process.wait(30)


class Engine:
    """One process with one engine; methods are those of `host.Engine`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._connection = host.connect()
        self._stream = self._connection.makefile("rw", encoding="utf-8")
        self.version = ""
        self._pid: int | None = None
        self._region: Path | None = None

    def start(self, model: Path, kv: dict[str, Any] | None = None, **options: Any) -> Engine:
        """Start the engine; raises `EngineError` with what stopped it."""
        if kv:
            kv = {**kv, "engine_id": f"rewarm-test-{os.getpid()}-{id(self)}"}
            self._region = Path(f"/dev/shm/vllm_offload_{kv['engine_id']}.mmap")
        options.setdefault("max_model_len", 4096)
        started = self.ask("start", model=str(model), kv=kv, **options)
        self._pid, self.version = int(started["pid"]), str(started["version"])
        return self

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the process do something."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        self._stream.write(json.dumps({"do": do, **arguments}) + "\n")
        self._stream.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to `tell`."""
        line = self._stream.readline()
        assert line, f"the engine is gone\n{self._host.log_tail()}"
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{answer['trace']}")
        return answer

    def generate(self, *prompts: list[int], **options: Any) -> dict[str, Any]:
        """Greedy answers to prompts, all at once."""
        return self.ask("generate", prompts=list(prompts), **options)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._pid is not None
        os.kill(self._pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Hang up, which ends the process, and remove the region that a killed one leaves in /dev/shm."""
        self._stream.close()
        self._connection.close()
        if self._pid is not None:
            end_s = time.monotonic() + 20
            while _alive(self._pid) and time.monotonic() < end_s:
                time.sleep(0.02)
            if _alive(self._pid):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = None
        if self._region is not None:
            self._region.unlink(missing_ok=True)


def rewarm_kv(pool: Path, *, connector: str = "RewarmConnector", **tier: Any) -> dict[str, Any]:
    """The configuration of vLLM for a pool; `tier` adds to the tier's."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "rewarm.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "RewarmCpuSpec",
            "spec_module_path": "rewarm.connectors.vllm_cpu",
            "cpu_bytes_to_use": REGION_BYTES,
            "secondary_tiers": [
                {
                    "type": "RewarmTier",
                    "module_path": "rewarm.connectors.vllm",
                    "url": f"file://{pool}?capacity=1GiB&poll=100ms",
                    "prefill_rate": 1,  # models of tests are computed faster than anything is loaded
                    **tier,
                }
            ],
        },
    }


def prompt(seed: int, tokens: int = 1000) -> list[int]:
    """Tokens of a context that no other seed shares."""
    dice = random.Random(seed)
    return [dice.randrange(3, 250) for _ in range(tokens)]


def whole_blocks(tokens: int) -> int:
    """Tokens of a prompt that lie in whole blocks: what can be restored of it."""
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
