"""A measurement in a process of its own, forked from one that has imported the engine: nothing is left of the last."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def in_child(folder: Path, work: Callable[[], Any]) -> Any:
    """Do work in a process of its own, whose prints go to a log in `folder`; its result, which JSON can hold."""
    answer, log = folder / "answer.json", folder / "log"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            answer.write_text(json.dumps(work()))
            code = 0
        except BaseException:  # noqa: BLE001  # the child ends here whatever happens: the rest of main is not its own
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"a process of the benchmark failed:\n{log.read_text()[-3000:]}")
    return json.loads(answer.read_text())
