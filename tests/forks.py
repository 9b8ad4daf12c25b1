"""Processes with an engine, each forked from a host that has imported it: new ones, without the seconds of the import.

`serve` is the host's side and runs in the engine's environment; `Host` and `Fork` are a test's. Line protocol on a Unix
socket: one JSON object in, one JSON object out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Host:
    """A process that imports an engine; it is waited for when the first fork is made."""

    start_timeout_s = 240.0

    def __init__(self, python: Path, script: Path, folder: Path, name: str, variables: Mapping[str, str]) -> None:
        """`script` calls `serve`; socket and log, with `name` in their names, come into `folder`."""
        self._socket = folder / f"host-{name}.sock"
        self._log = folder / f"host-{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), str(script), str(self._socket)], stdout=log, stderr=subprocess.STDOUT, env=variables
            )

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection to a new child, whose answers may take so long."""
        end_s = time.monotonic() + self.start_timeout_s
        while not self._socket.exists():
            assert self._process.poll() is None, self.log_tail()
            assert time.monotonic() < end_s, f"the engine was not imported in time\n{self.log_tail()}"
            time.sleep(0.05)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(str(self._socket))
        return connection

    def log(self) -> str:
        """What host and forks printed."""
        return self._log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The end of it."""
        return self.log()[-4000:]

    def close(self) -> None:
        """End the host; forks end when they are hung up on."""
        self._process.terminate()
        self._process.wait(30)


class Fork:
    """One process; the verbs are the methods of what its host serves."""

    error: type[Exception] = RuntimeError
    """What is raised here for what was raised there; the text is that of its exception."""

    def __init__(self, host: Host, timeout_s: float) -> None:
        self._host = host
        self._connection = host.connect(timeout_s)
        self._stream = self._connection.makefile("rw", encoding="utf-8")

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
        assert line, f"the process is gone\n{self._host.log_tail()}"
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self.error(f"{answer['error']}\n{answer['trace']}")
        return answer

    def hang_up(self) -> None:
        """The process ends when nobody listens."""
        self._stream.close()
        self._connection.close()


def serve(path: str, make: Callable[[], object]) -> None:
    """Accept connections for as long as the parent lives; each is served by a child, from an object of its own."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(8)
    os.rename(f"{path}.new", path)  # who sees the name can connect
    listener.settimeout(1.0)
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(None)
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _answer_all(connection, make())
                os._exit(0)
            connection.close()


def _answer_all(connection: socket.socket, served: object) -> None:
    """Serve one client until it hangs up."""
    stream = connection.makefile("rw", encoding="utf-8")
    for line in stream:
        request = json.loads(line)
        try:
            answer = getattr(served, request.pop("do"))(**request)
        except BaseException as error:  # noqa: BLE001  # whatever it is belongs to the client, across the process
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
