"""Real LMCache servers for the tests: each a process of its own, forked from a host that has imported LMCache."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests import forks
from tests.remote import ROOT
from tests.remote import environment as environment_with

ENVIRONMENT = Path(os.environ.get("REWARM_LMCACHE_ENV", ROOT / ".venv-lmcache"))
VERSIONS = ("0.5.6", "0.5.7")
ANSWER_TIMEOUT_S = 90.0
L1_BYTES = 32 << 20
OBJECT_BYTES = 128 << 10


class ServerError(Exception):
    """What went wrong inside a server; the text is that of its exception."""


def environment(version: str) -> dict[str, str]:
    """Variables under which a Python of the environment imports this LMCache."""
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
    return environment_with(ENVIRONMENT / f"lmcache-{version}", **quiet)


class Host(forks.Host):
    """A process that imports one version of LMCache."""

    start_timeout_s = 120.0

    def __init__(self, folder: Path, version: str) -> None:
        self.version = version
        self._servers: list[Server] = []
        python, script = ENVIRONMENT / "bin" / "python", Path(__file__).with_name("host.py")
        super().__init__(python, script, folder, version, environment(version))

    def server(self, pool: Path | str, *, l1_bytes: int = L1_BYTES, **params: Any) -> Server:
        """A new server over a pool; `params` are added to `adapter_params`. Raises `ServerError` with what stopped
        its start."""
        server = Server(self)
        self._servers.append(server)
        server.start(adapter(pool, **params), l1_bytes)
        return server

    def close(self) -> None:
        """End every server and the host."""
        for server in self._servers:
            server.hang_up()
        super().close()


class Server(forks.Fork):
    """One process with one `StorageManager`; the verbs are those of `host.Server`."""

    error = ServerError

    def __init__(self, host: Host) -> None:
        super().__init__(host, ANSWER_TIMEOUT_S)
        self.pid = 0

    def start(self, adapter: dict[str, Any], l1_bytes: int) -> None:
        """Make the manager."""
        self.pid = int(self.ask("start", adapter=adapter, l1_bytes=l1_bytes)["pid"])

    def end(self) -> None:
        """An orderly end."""
        self.ask("close")
        self.hang_up()

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.hang_up()


def adapter(pool: Path | str, **params: Any) -> dict[str, Any]:
    """The value of `--l2-adapter` for a pool."""
    url = f"file://{pool}?capacity=256MiB&poll=100ms" if isinstance(pool, Path) else pool
    return {
        "type": "plugin",
        "module_path": "rewarm.connectors.lmcache",
        "class_name": "RewarmL2Adapter",
        "adapter_params": {"url": url, "namespace": "tests", **params},
    }
