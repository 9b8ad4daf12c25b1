"""Real engines for the tests: each is a process of its own, forked from a host that has imported vLLM (`host.py`)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from tests import forks
from tests.remote import ROOT, environment

ENVIRONMENT = Path(os.environ.get("REWARM_ENGINE_ENV", ROOT / ".venv-vllm"))
ANSWER_TIMEOUT_S = 120.0
REGION_BYTES = 64 << 20
BLOCK_TOKENS = 32


class EngineError(Exception):
    """What went wrong inside an engine; the text is that of its exception."""


class Host(forks.Host):
    """A process that imports one version of vLLM."""

    def __init__(self, folder: Path, version: str) -> None:
        self._engines: list[Engine] = []
        variables = environment(ENVIRONMENT / f"vllm-{version}", VLLM_CACHE_ROOT=str(ENVIRONMENT / "cache"))
        script = Path(__file__).with_name("host.py")
        super().__init__(ENVIRONMENT / "bin" / "python", script, folder, version, variables)

    def engine(self) -> Engine:
        """A new process, without an engine yet."""
        self._engines.append(Engine(self))
        return self._engines[-1]

    def close(self) -> None:
        """End every engine and the host."""
        for engine in self._engines:
            engine.close()
        super().close()


class Engine(forks.Fork):
    """One process with one engine; methods are those of `host.Engine`."""

    error = EngineError

    def __init__(self, host: Host) -> None:
        super().__init__(host, ANSWER_TIMEOUT_S)
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
        self.hang_up()
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
