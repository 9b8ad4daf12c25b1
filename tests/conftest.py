"""What every suite shares: Hypothesis never judges by time, and no test reads the settings of its caller."""

from __future__ import annotations

import os

import hypothesis
import pytest

hypothesis.settings.register_profile("rewarm", deadline=None)
if not os.environ.get("CI"):  # with CI set, Hypothesis picks its own profile: repeatable, without deadlines
    hypothesis.settings.load_profile("rewarm")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terminal settings of the caller change what the command line prints."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM"):
        monkeypatch.delenv(name, raising=False)
