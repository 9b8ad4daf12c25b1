"""Runs inside the engine's own environment: vLLM's real OpenAI server, forked from a process that has imported it.

A fork serves as a fresh process would, without the quarter of a minute that importing takes. A connection to the Unix
socket names a server: the one that runs under that name is stopped as an administrator would stop it, and a new one
started. The answer comes when the old one is gone.

    live_host.py SOCKET SERVERS.json         with {name: [arguments of the server..]}
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
}
MODULE = "vllm.entrypoints.openai.api_server"
STOP_S = 20.0
SETTLE_S, STILL_S = 15.0, 2.0


def main(path: str, servers: dict[str, list[str]]) -> None:
    """Serve until the parent is gone, then stop every server."""
    os.environ.update(SETTINGS)
    parent = os.getppid()
    for module in ("vllm", MODULE, "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3"):
        importlib.import_module(module)
    importlib.import_module("rewarm.connectors.vllm_cpu")
    running: dict[str, int] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(8)
    os.rename(f"{path}.new", path)
    listener.settimeout(0.5)
    try:
        while os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(5.0)
                    name = connection.recv(100).decode()
                    if not name:  # whoever asked for us is done
                        return
                    settle(running.get(name, 0))
                    stop(running.pop(name, 0))
                    running[name] = start(servers[name], listener, connection)
                    connection.sendall(b"started")
    finally:
        for pid in running.values():
            stop(pid)


def start(arguments: list[str], *sockets: socket.socket) -> int:
    """Fork a server; its process id, which is that of its group too."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    for inherited in sockets:
        inherited.close()
    # vLLM's CPU platform asks for fresh processes, each of which would import everything again.
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking  # type: ignore[assignment,misc]
    sys.argv = [MODULE, *arguments]
    sys.modules.pop(MODULE)
    runpy.run_module(MODULE, run_name="__main__")
    os._exit(0)


def settle(group: int) -> None:
    """Wait until a server has written nothing for a while: it answers before what it saves has reached the store."""
    end_s = time.monotonic() + SETTLE_S
    still_since_s, last = time.monotonic(), written(group)
    while group and time.monotonic() < min(end_s, still_since_s + STILL_S):
        time.sleep(0.1)
        now = written(group)
        if now != last:
            still_since_s, last = time.monotonic(), now


def written(group: int) -> int:
    """Bytes that the processes of a group have written to media, by the kernel's count."""
    total = 0
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(place.name)) == group:
                total += int((place / "io").read_text().split("\nwrite_bytes: ")[1].split()[0])
    return total


def stop(pid: int) -> None:
    """End a server in order, and what is left of its group by force."""
    if not pid:
        return
    end_s = time.monotonic() + STOP_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGINT)
        while time.monotonic() < end_s and os.waitpid(pid, os.WNOHANG)[0] == 0:
            time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))
