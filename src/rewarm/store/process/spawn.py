"""Starts the interpreter of an I/O process: a new one, not a fork, that inherits two descriptors and little else."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from rewarm.errors import StorageError
from rewarm.store.process.child import Terms

_BOOT = (
    "import ctypes, json, sys; ctypes.CDLL(None).setenv(b'OPENBLAS_NUM_THREADS', b'1', 1); "
    "sys.path[:] = json.loads(sys.argv[1]); from rewarm.store.process.child import main; main(sys.argv[2])"
)
"""What the interpreter runs: no site packages are looked for, and numpy makes no threads that nobody needs."""


def spawn(terms: Terms, channel: socket.socket, tables: int) -> subprocess.Popen[bytes]:
    """Run the other end of a channel over the tables in this descriptor. Raises `StorageError`."""
    full = msgspec.structs.replace(terms, channel=channel.fileno(), tables=tables)
    here = str(Path(__file__).parents[3])
    paths = json.dumps([here, *(path for path in sys.path if path and path != here)])
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, paths, msgspec.json.encode(full).decode()],
            pass_fds=(full.channel, full.tables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is the engine's
            cwd="/",
        )
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"the I/O process cannot be started: {error}") from error


def how_it_ended(code: int | None) -> str:
    """A return code in words."""
    if code is None:
        return "it is not known how"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
