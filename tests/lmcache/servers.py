"""Real LMCache servers for the tests: each a process of its own, forked from a host that has imported LMCache."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("REWARM_LMCACHE_ENV", ROOT / ".venv-lmcache"))
VERSIONS = ("0.5.6", "0.5.7")
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 90.0
L1_BYTES = 32 << 20
OBJECT_BYTES = 128 << 10


class ServerError(Exception):
    """What went wrong inside a server; the text is that of its exception."""


def environment(version: str) -> dict[str, str]:
    """Variables under which a Python of the environment imports this LMCache."""
    # Compiled modules are kept: an import without them takes twice as long.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
    overlay = ENVIRONMENT / f"lmcache-{version}"
    return {**kept, **quiet, **({"PYTHONPATH": str(overlay)} if overlay.is_dir() else {})}


class Host:
    """A process that imports one version of LMCache; it is waited for when the first server is made."""

    def __init__(self, folder: Path, version: str) -> None:
        self.version = version
        self._socket = folder / f"host-{version}.sock"
        self._log = folder / f"host-{version}.log"
        self._servers: list[Server] = []
        command = [str(ENVIRONMENT / "bin" / "python"), str(Path(__file__).with_name("host.py")), str(self._socket)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(version))

    def server(self, pool: Path | str, *, l1_bytes: int = L1_BYTES, **params: Any) -> Server:
        """A new server over a pool; `params` are added to `adapter_params`. Raises `ServerError` with what stopped
        its start."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while not self._socket.exists():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end_s, f"LMCache was not imported in time\n{self.log()}"
            time.sleep(0.05)
        server = Server(self, self._socket)
        self._servers.append(server)
        server.start(adapter(pool, **params), l1_bytes)
        return server

    def log(self) -> str:
        """What host and servers printed."""
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End every server and the host."""
        for server in self._servers:
            server.hang_up()
        self._process.terminate()
        self._process.wait(30)


class Server:
    """One process with one `StorageManager`; the verbs are those of `host.Server`."""

    def __init__(self, host: Host, path: Path) -> None:
        self._host = host
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        self._connection.connect(str(path))
        self._stream = self._connection.makefile("rw", encoding="utf-8")
        self.pid = 0

    def start(self, adapter: dict[str, Any], l1_bytes: int) -> None:
        """Make the manager."""
        self.pid = int(self.ask("start", adapter=adapter, l1_bytes=l1_bytes)["pid"])

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the process do something."""
        self._stream.write(json.dumps({"do": do, **arguments}) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        assert line, f"the server is gone\n{self._host.log()[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ServerError(f"{answer['error']}\n{answer['trace']}")
        return answer

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask without waiting for the answer."""
        self._stream.write(json.dumps({"do": do, **arguments}) + "\n")
        self._stream.flush()

    def end(self) -> None:
        """An orderly end."""
        self.ask("close")
        self.hang_up()

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.hang_up()

    def hang_up(self) -> None:
        """The process ends when nobody listens."""
        self._stream.close()
        self._connection.close()


def adapter(pool: Path | str, **params: Any) -> dict[str, Any]:
    """The value of `--l2-adapter` for a pool."""
    url = f"file://{pool}?capacity=256MiB&poll=100ms" if isinstance(pool, Path) else pool
    return {
        "type": "plugin",
        "module_path": "rewarm.connectors.lmcache",
        "class_name": "RewarmL2Adapter",
        "adapter_params": {"url": url, "namespace": "tests", **params},
    }
