"""Facts about the machine that made a number, as every result carries them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def package_version() -> str:
    """The version of Rewarm that is running."""
    return importlib.metadata.version("rewarm")


def host_facts() -> dict[str, Any]:
    """Machine, kernel, processor, memory and Python; names carry units, unknown facts are null."""
    return {
        "node": platform.node(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "python": platform.python_version(),
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
