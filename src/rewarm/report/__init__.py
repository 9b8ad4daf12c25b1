"""Shows results: one or more of them as a single HTML page that opens from disk, without a network.

It renders what `bench` and `plan` found and computes no figure of its own: each one in the page stands in the JSON.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rewarm.bench.result import Result
from rewarm.plan.result import Plan
from rewarm.report.page import read_result, render

__all__ = ["read_result", "render", "write_report"]


def write_report(results: Sequence[Result | Plan], path: str | os.PathLike[str]) -> None:
    """Write the page of these results to `path`. Raises `ConfigError` without results, `OSError` for the file."""
    Path(path).write_text(render(results), encoding="utf-8")
