"""Work done in a forked child under another user, for tests of permissions that root does not feel."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOBODY = 65534


@contextlib.contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that other users may enter: those of pytest are private."""
    with tempfile.TemporaryDirectory(prefix="rewarm-public-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


CHILD_S_MAX = 30


def as_user(work: Callable[[], object], user: int = NOBODY, group: int = NOBODY, umask: int = 0o077) -> str:
    """What `work` returns, or the exception it raises, as text: "ConfigError: ..". Skips where one is not root."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests; the child uses none of theirs
        child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S_MAX)
        try:
            os.setgroups([group])
            os.setgid(group)
            os.setuid(user)
            os.umask(umask)
            answer = str(work())
        except BaseException as error:  # noqa: BLE001 told to the parent
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child hung or died"
    return answer
