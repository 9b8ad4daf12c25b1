"""A process in another environment that does what a test asks: JSON lines over its standard input and output."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ANSWER_TIMEOUT_S = 120.0


def environment(overlay: Path | None = None, **settings: str) -> dict[str, str]:
    """This process's variables and these, for a Python that finds the tests, and first what is in `overlay`."""
    # Compiled modules are kept: an import of an engine without them takes up to four times as long.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    paths = [str(overlay)] if overlay is not None and overlay.is_dir() else []
    paths += [*filter(None, [kept.get("PYTHONPATH")]), str(ROOT)]
    return {**kept, **settings, "PYTHONPATH": os.pathsep.join(paths)}


class RemoteError(Exception):
    """What went wrong over there; the text is that of its exception."""


class Remote:
    """A worker: `remote.ask("verb", name=value)` calls a method of the class that its script serves."""

    def __init__(self, python: Path, script: Path, log: Path) -> None:
        self._log = log
        variables = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                [str(python), str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, env=variables
            )
        assert self._process.stdout is not None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, do: str, **arguments: Any) -> Any:
        """Have something done. Raises `RemoteError` with what was raised there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._line())
        if "error" in answer:
            raise RemoteError(f"{answer['error']}\n{answer['trace']}")
        return answer["value"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            assert self._selector.select(ANSWER_TIMEOUT_S), f"no answer in time\n{self.log_tail()}"
            read = os.read(self._process.stdout.fileno(), 1 << 20)
            assert read, f"the process is gone\n{self.log_tail()}"
            line += read
        return line

    def log_tail(self) -> str:
        """The end of what it wrote to standard error."""
        return self._log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._selector.close()
        if self._process.stdout is not None:
            self._process.stdout.close()


def damage(pool: Path, how: str) -> None:
    """Have a pool's segments "flipped" (every bit), "truncated" (by a quarter), or "removed"."""
    for path in pool.glob("writers/*/*.seg"):
        content = path.read_bytes()
        if how == "removed":
            path.unlink()
        else:
            path.write_bytes(bytes(b ^ 1 for b in content) if how == "flipped" else content[: len(content) // 4 * 3])


def serve(worker: object) -> None:
    """Answer until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:  # noqa: BLE001  # whatever it is belongs to the other process
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
