"""Cold recovery in a real vLLM server: recompute, vLLM's own file-system tier, Rewarm. See README.md beside this.

    .venv-vllm/bin/python examples/vllm_cold_recovery/run.py [--tokens 2048] [--concurrency 2,4,8] [--directory DIR]

For each of the three: start the server, have it compute every session once, stop it, start it again, and send waves of
sessions it has seen before, each session once. Needs the engine's environment (make engine-env) and about 2 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.connectors.vllm.launch import transfer_config

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 600.0
REGION_BYTES = 768 << 20
BLOCK_TOKENS = 64
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""16 KiB of KV a token in float32."""


@dataclass(frozen=True)
class Answer:
    """One request: seconds to the first token, seconds per token after it, tokens of the prompt that were restored."""

    first_s: float
    per_token_s: float
    hit_tokens: int


def main() -> None:
    """Run the three, print one table."""
    parser = argparse.ArgumentParser(description="Cold recovery in a real vLLM server on this machine's CPU.")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each session's context")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--concurrency", default="2,4,8", help="sessions of each wave")
    parser.add_argument("--directory", type=Path, help="where the blocks go; default: a temporary directory")
    arguments = parser.parse_args()
    waves = [int(count) for count in arguments.concurrency.split(",")]
    folder = Path(tempfile.mkdtemp(prefix="rewarm-example-", dir=arguments.directory))
    try:
        make_model(folder / "model")
        print(f"{arguments.tokens} tokens a session, {arguments.answer} tokens an answer, float32 on the CPU")
        print(HEADER)
        for name, config in configurations(folder).items():
            recover(name, config, folder, waves, arguments.tokens, arguments.answer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def configurations(folder: Path) -> dict[str, dict[str, Any] | None]:
    """`--kv-transfer-config` of each; vLLM's own tier under the same CPU worker as Rewarm."""
    for name in ("fs", "rewarm"):
        (folder / name).mkdir()
    rewarm = transfer_config(f"file://{folder}/rewarm?capacity=4GiB", staging_bytes=REGION_BYTES, cpu=True)
    extra = {**rewarm["kv_connector_extra_config"], "secondary_tiers": [{"type": "fs", "root_dir": f"{folder}/fs"}]}
    own = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {"recompute": None, "vllm fs": {**own, "kv_connector_extra_config": extra}, "rewarm": rewarm}


def recover(name: str, config: dict[str, Any] | None, folder: Path, waves: list[int], tokens: int, answer: int) -> None:
    """Populate, restart, send the waves, print a row for each."""
    sessions = [prompt(seed, tokens) for seed in range(sum(waves))]
    if config is not None:
        with server(folder, config) as port:
            for session in sessions:
                ask(port, session, 1)
            ask(port, prompt(len(sessions), 100), 1)  # one step more: the last stores begin with the next request
            time.sleep(2.0)  # vLLM tells nobody when its own tier has written everything
    with server(folder, config) as port:
        ask(port, prompt(len(sessions) + 1, 100), 2)  # the first request of a server pays for lazy imports
        for count in waves:
            wave, sessions = sessions[:count], sessions[count:]
            start_s = time.monotonic()
            with ThreadPoolExecutor(count) as threads:
                answers = list(threads.map(lambda session: ask(port, session, answer), wave))
            print(row(name, count, answers, count * (tokens + answer) / (time.monotonic() - start_s)), flush=True)


HEADER = f"{'':10} {'waves of':>8} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'TPOT':>9} {'tokens/s':>9} {'hit tokens':>11}"


def row(name: str, count: int, answers: list[Answer], tokens_per_s: float) -> str:
    """One line of the table."""
    first = sorted(answer.first_s for answer in answers)
    p50, p90, p99 = (first[min(len(first) - 1, int(len(first) * share))] for share in (0.5, 0.9, 0.99))
    per_token = statistics.mean(answer.per_token_s for answer in answers)
    hits = sum(answer.hit_tokens for answer in answers)
    times = f"{p50:8.2f}s {p90:7.2f}s {p99:7.2f}s {per_token * 1e3:7.1f}ms"
    return f"{name:10} {count:8} {times} {tokens_per_s:9.0f} {hits:11}"


@contextlib.contextmanager
def server(folder: Path, config: dict[str, Any] | None) -> Iterator[int]:
    """A vLLM server, ready; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "16384", "--max-num-batched-tokens", "16384", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--block-size", str(BLOCK_TOKENS), "--enable-prompt-tokens-details"]
    if config is not None:
        command += ["--kv-transfer-config", json.dumps(config)]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(os.cpu_count())}
    settings |= {"TORCHDYNAMO_DISABLE": "1"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **settings})
    try:
        wait_until_ready(process, port, folder / "server.log")
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Return when the server answers; end the example with its log if it dies."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            sys.exit(f"the server ended:\n{log.read_text()[-4000:]}")
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    sys.exit(f"the server was not ready after {START_TIMEOUT_S:.0f} s:\n{log.read_text()[-4000:]}")


def ask(port: int, tokens: list[int], answer: int) -> Answer:
    """Send one session, read its answer as it comes."""
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    start_s = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"the server answered {response.status}: {response.read().decode()[:1000]}")
    times, hits = [], 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event["choices"]:
            times.append(time.monotonic())
        if event.get("usage"):
            hits = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    connection.close()
    return Answer(times[0] - start_s, (times[-1] - times[0]) / max(1, len(times) - 1), hits)


def prompt(seed: int, tokens: int) -> list[int]:
    """The context of one session; sessions share nothing."""
    dice = random.Random(seed)
    return [dice.randrange(3, 250) for _ in range(tokens)]


def make_model(path: Path) -> None:
    """A model with random weights, from the tests' own maker."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    sys.path.insert(0, str(ROOT))
    from tests.engine.models import make

    make(str(path), **SIZES)


if __name__ == "__main__":
    main()
